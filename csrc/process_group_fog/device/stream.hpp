// Streams and events of any device, without its toolkit; a cpu has none, and there all of this does nothing.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace fog::device {

// A point in what a device has been given to do.
using Event = std::shared_ptr<c10::Event>; // null on a cpu

// The stream of a device that the program uses on this thread; none on a cpu.
std::optional<c10::Stream> current_stream(const at::Device& device);

// Whether the program captures the device's current stream into a graph. Torch before 2.13 cannot tell: false.
bool is_capturing(const at::Device& device);

// Tells torch's allocator that a stream uses a tensor, whose memory must not be given to others before the stream has done what it has now.
// Does nothing for memory of another library: not every allocator of torch takes that.
void use_on(const c10::Stream& stream, const at::Tensor& tensor);

// The end of what a stream has now. In any thread: a device that is not the stream's is left alone, as when the event is dropped. (What
// torch does for an event ends with a cudaSetDevice to the thread's own device, 0 in a thread of fog's, where that takes hundreds of MB.)
Event record_on(const c10::Stream& stream);

// A stream of fog's own on a device, beside those of the program.
class Stream {
 public:
  // One of torch's pool, of which there are 32: others may have the same one.
  explicit Stream(const at::Device& device);

  // What this thread gives to the device while this lives goes to the stream, after what the program's current stream has now.
  class Guard {
   public:
    explicit Guard(const Stream& stream);

   private:
    c10::OptionalStreamGuard guard_;
  };
  // The end of what the stream has now.
  Event record() const;
  // Itself; none on a cpu.
  const std::optional<c10::Stream>& get() const {
    return stream_;
  }

 private:
  std::optional<c10::Stream> stream_;
};

// Lets the program's current stream of the event's device wait for it; the host goes on.
void order_after(const Event& event);

// Not for a stream that is being captured.
bool has_happened(const Event& event);

// The same, but false where the device cannot say: for destructors.
bool is_known_to_have_happened(const Event& event) noexcept;

} // namespace fog::device

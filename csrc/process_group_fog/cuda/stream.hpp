// Streams and events of any device, without its toolkit; a cpu has none, and there all of this does nothing.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace fog::cuda {

// A point in what a device has been given to do.
using Event = std::shared_ptr<c10::Event>; // null on a cpu

// The stream of a device that the program uses on this thread; none on a cpu.
std::optional<c10::Stream> current_stream(const at::Device& device);

// Whether the program captures the device's current stream into a graph. Torch before 2.13 cannot tell: false.
bool is_capturing(const at::Device& device);

// Whether the tensor's memory is of torch's allocator: that of a window, or of another library, is not.
bool is_allocated_by_torch(const at::Tensor& tensor);

// Tells that allocator that a stream uses a tensor, whose memory must not be given to others before the stream has done what it has now.
// Does nothing for other memory: not every allocator of torch takes that.
void use_on(const c10::Stream& stream, const at::Tensor& tensor);

// The end of what a stream has now. In any thread: a device that is not the stream's is left alone, as when the event is dropped. (What
// torch does for an event ends with a cudaSetDevice to the thread's own device, 0 in a thread of fog's, where that takes hundreds of MB.)
Event record_on(const c10::Stream& stream);

// A stream of fog's own on a device, beside those of the program.
class Stream {
 public:
  // One of torch's pool, of which there are 32: others may have the same one.
  explicit Stream(const at::Device& device);
  // One that nobody else has, for what may wait for long: a stream that waits may hold back those that share a queue of the hardware with
  // it, so this one has the greatest priority, and others seldom do. With the last copy it goes; tensors of torch's allocator are not
  // for it, which would look for it later. One of the pool where the device's driver has none or torch does not take it.
  static Stream apart(const at::Device& device);

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
  Stream() = default;

  std::optional<c10::Stream> stream_;
  std::shared_ptr<void> handle_; // of one that nobody else has
};

// Lets the program's current stream of the event's device wait for it; the host goes on.
void order_after(const Event& event);

// Not for a stream that is being captured.
bool has_happened(const Event& event);

// The same, but false where the device cannot say: for destructors.
bool is_known_to_have_happened(const Event& event) noexcept;

} // namespace fog::cuda

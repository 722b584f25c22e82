// Streams and events of any device but the CPU, without its toolkit.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

namespace fog::device {

// A point in the work that a device has been given.
using Event = std::shared_ptr<c10::Event>; // null if there was no such work

// The stream of a device that the program uses on this thread.
c10::Stream current_stream(const at::Device& device);

// Returns whether the program captures the device's current stream into a graph. Torch before 2.13 cannot tell: false.
bool is_capturing(const at::Device& device);

// Tells torch's allocator that a stream uses a tensor, so that its memory is not reused before the stream has finished
// its present work. Does nothing for memory of other libraries, which some of torch's allocators reject.
void use_on(const c10::Stream& stream, const at::Tensor& tensor);

// The end of the stream's present work. In any thread: does not touch other devices than the stream's, and neither does
// dropping the event. (torch's own events end with a cudaSetDevice to the thread's device, 0 in fog's threads, where
// that takes hundreds of MB.)
Event record_on(const c10::Stream& stream);

// A stream of fog's own on a device, beside those of the program.
class Stream {
 public:
  enum class From {
    kPool, // one of the 32 streams in torch's pool, so the program may have the same one
    kDevice, // outside of the pool where the device is a GPU; all that ask for it have the same one
  };
  explicit Stream(const at::Device& device, From from = From::kPool);

  // While it lives, this thread's work for the device goes to the stream, after the present work of the program's
  // current stream.
  class Guard {
   public:
    explicit Guard(const Stream& stream);

   private:
    c10::OptionalStreamGuard guard_;
  };
  // The end of the stream's present work.
  Event record() const;
  // The stream itself.
  const c10::Stream& get() const {
    return stream_;
  }

 private:
  const c10::Stream stream_;
};

// Makes the program's current stream of the event's device wait for the event, without blocking the host.
void order_after(const Event& event);

// Must not be called for a stream that is being captured.
bool has_happened(const Event& event);

// The same, but returns false if the device cannot say: for destructors.
bool is_known_to_have_happened(const Event& event) noexcept;

} // namespace fog::device

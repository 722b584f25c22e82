// How values come into a slot whose writer reaches this process's memory one-sidedly.
//
// The origin puts into a mailbox in the owner's pool: two buffers, in turn, each a header and a value, and then the number of the put, its
// version. Nobody but the origin writes there, and it writes to a buffer again only when the put in between has its number there: so who
// reads a buffer, and finds the number unchanged afterwards, has read one put as a whole. The owner does so, for its own slot, whenever it
// looks at that slot: it absorbs. What counts from then on is the slot, as everywhere.
//
// A put is seen as soon as it is there; an accumulate comes as a message, and so later than puts that its origin made after it. So both
// are numbered. This is the rule, which makes of them what the origin's calls, one after the other, would have made:
//
// - Puts of one origin have the numbers 1, 2, 3, ... and an accumulate has the number of the puts made before it.
// - The owner absorbs before it applies an accumulate. If it has absorbed a put with a larger number than the accumulate's by then, that put
//   has replaced what was accumulated: the values are dropped. Else they are added, to what the slot holds by now, which may be nothing.
// - A put without p leaves p as it is. So a header says which put was the last one that had a p, and which; it replaces the slot's p
//   once, when it is first absorbed. An accumulate's p is dropped only if a put with p that has a larger number was absorbed, and added
//   otherwise, whatever becomes of the values.
//
// So each value and each p that no later put replaces is collected exactly once, whenever the owner takes what is there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "transport/message.hpp"
#include "windows/slot_values.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// What comes before a value.
struct alignas(64) PutHeader {
  uint64_t number; // of the put
  uint64_t p_number; // of the last put up to this one that had a p; 0: there was none
  double p; // which it had
};

// Lies in the owner's pool, and is followed by two buffers.
struct alignas(64) Mailbox {
  std::atomic<uint64_t> version; // number of the latest put that is whole; the origin writes it
  // Whether the owner has tried in vain to read a whole put: the origin makes a pause then. The owner writes it.
  alignas(64) std::atomic<uint64_t> starves;
};

// Where things are in a mailbox for values of so many bytes, from its beginning on.
struct MailboxLayout {
  size_t value_bytes;

  size_t buffer_bytes() const {
    return sizeof(PutHeader) + (value_bytes + alignof(PutHeader) - 1) / alignof(PutHeader) * alignof(PutHeader);
  }
  size_t bytes() const {
    return sizeof(Mailbox) + 2 * buffer_bytes();
  }
  size_t header(uint64_t number) const {
    return sizeof(Mailbox) + number % 2 * buffer_bytes();
  }
  size_t value(uint64_t number) const {
    return header(number) + sizeof(PutHeader);
  }
};

// The owner's side of a mailbox: from now on it alone is the writer of that slot, as the Slot has it. Any thread may call.
class MailboxReader {
 public:
  MailboxReader(Mailbox& mailbox, const WindowView& view, size_t slot, const SlotValues& values)
      : mailbox_(mailbox), layout_{values.bytes}, view_(view), slot_(slot), values_(values) {}

  // Brings the latest put to the slot, if it is not there yet, and counts those that it has replaced as well.
  void absorb();
  // What has come by message: kAccumulate, with its number, or kPut of an origin that cannot reach the mailbox.
  void apply(WindowOp op, double weight, std::optional<double> p, uint64_t number, const void* data);

 private:
  void take_latest();

  Mailbox& mailbox_;
  const MailboxLayout layout_;
  const WindowView& view_;
  const size_t slot_;
  const SlotValues& values_;
  std::mutex mutex_;
  uint64_t absorbed_ = 0; // number of the last put
  uint64_t p_absorbed_ = 0; // and of the last one whose p was
};

} // namespace fog

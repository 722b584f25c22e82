// Mailboxes bring values into a slot whose writer reaches this process's memory one-sidedly.
//
// The origin puts into a mailbox in the owner's pool. It has two buffers, used in turn, each with a header and a value;
// the number of the put, its version, is written last. Only the origin writes there, and it reuses a buffer only after
// the put into the other buffer has published its number. So if a reader finds the number unchanged after it has read a
// buffer, it has read one complete put. The owner reads this way whenever it accesses its slot: it absorbs the put.
// From then on the slot holds the value, as with every other writer.
//
// A put is visible as soon as it is in the mailbox. An accumulate comes as a message, and so may come later than puts
// that its origin made after it. Therefore both are numbered. The following rules give the same result as the origin's
// calls one after the other:
//
// - Puts of one origin have the numbers 1, 2, 3, ..., and an accumulate has the number of the last put before it.
// - The owner absorbs before it applies an accumulate. If it has already absorbed a put with a larger number than the
//   accumulate's, that put has replaced the accumulated values, and they are dropped. Otherwise they are added to the
//   slot's current value, which may be empty.
// - A put without p leaves p unchanged. So a header contains the number of the last put that had a p, and that p; it
//   replaces the slot's p once, when it is first absorbed. An accumulate's p is dropped only if a put with p and a
//   larger number has been absorbed, and added otherwise, regardless of the values.
//
// So each value and each p that no later put replaces is collected exactly once, no matter when the owner absorbs.
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

// Precedes a value.
struct alignas(64) PutHeader {
  uint64_t number; // of the put
  uint64_t p_number; // of the last put up to this one with a p; 0 if there was none
  double p; // of that put
};

// In the owner's pool, followed by two buffers.
struct alignas(64) Mailbox {
  std::atomic<uint64_t> version; // number of the latest complete put; written by the origin
  // Whether the owner has failed to read a complete put; the origin then pauses. Written by the owner.
  alignas(64) std::atomic<uint64_t> starves;
};

// Offsets in a mailbox for values of this size.
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

// The owner's side of a mailbox: it alone is the writer of that slot, in the sense of Slot. Any thread may call it.
class MailboxReader {
 public:
  MailboxReader(Mailbox& mailbox, const WindowView& view, size_t slot, const SlotValues& values)
      : mailbox_(mailbox), layout_{values.bytes}, view_(view), slot_(slot), values_(values) {}

  // Brings the latest put to the slot, if it is not there yet, and adds the puts that it has replaced to the slot's
  // version.
  void absorb();
  // Applies an accumulate, which came as a message, with its number.
  void accumulate(double weight, std::optional<double> p, uint64_t number, const void* data);

 private:
  void take_latest();

  Mailbox& mailbox_;
  const MailboxLayout layout_;
  const WindowView& view_;
  const size_t slot_;
  const SlotValues& values_;
  std::mutex mutex_;
  uint64_t absorbed_ = 0; // number of the last absorbed put
  uint64_t p_absorbed_ = 0; // number of the last put whose p was absorbed
};

} // namespace fog

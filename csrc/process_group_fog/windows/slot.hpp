// What one rank has written for another: a value that is replaced as a whole, without locks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

namespace fog {

// The bookkeeping of one slot of a window: which of several buffers holds its value, and who reads which. The buffers
// themselves are elsewhere. Lives in memory that the slot's owner and its writer have mapped.
//
// A value is never changed in place: it is written to a buffer that nobody looks at and then published, by one change of one
// word, so that no reader sees a value in the making, and no side waits for the other. The owner pins the buffer that it
// reads. Three buffers are enough for that: the latest value, one that the owner still reads, and one to write to.
//
// The owner itself replaces the value when it gets it from the other rank, or takes it. Two buffers of its own are for the
// first, and for a slot that was taken there is a state without a buffer: nothing has to be cleared. So a writer that adds to
// the latest value has to look again when it publishes: what the owner has taken meanwhile must not be added once more, and a
// value that it has replaced may have been overwritten while it was read.
//
// With each value goes p, the push-sum weight, which is of the same state always.
class Slot {
 public:
  static constexpr unsigned kWriters = 3; // buffers, from 0 on
  static constexpr unsigned kOwners = 2; // those after them

  // What a side saw when it looked.
  struct View {
    unsigned buffer; // with the latest value
    bool empty; // there is none: it counts as zeros
    double p;
    uint32_t change; // number of the state seen
  };

  // --- for the writer, one thread at a time ---
  // A buffer to write to.
  unsigned writers_buffer() const;
  // Whether the owner has probably read what is in that buffer: not if it has not looked since the last two puts.
  bool may_have_been_read() const {
    return load().version < 2;
  }
  // Replaces the value, and p unless there is none. Counts as a new version, or as several of which nobody has seen the others.
  void put(unsigned buffer, std::optional<double> p, uint64_t versions = 1);
  // The value to add to.
  View base() const;
  // Publishes a sum on that base; false if the value is not that one any more: then the sum may be anything, and the base()
  // of now is to be added to.
  bool add(unsigned buffer, double p, const View& base);

  // --- for the owner, one thread at a time: it does not replace what it reads ---
  unsigned owners_buffer() const;
  // As put() does for the writer.
  void replace(unsigned buffer) {
    put(buffer, std::nullopt);
  }
  // Pins the latest value and starts to count versions anew; with `take` the slot is empty from then on. `take_p`: p goes
  // with it; otherwise it stays.
  View pin(bool take, bool take_p);
  void unpin();
  void reset_version();
  // Puts since the last pin() or reset_version().
  uint32_t version() const;
  double p() const;

  // Before anybody else knows the slot.
  void start(std::optional<unsigned> buffer);

 private:
  // The whole state in one word.
  struct State {
    unsigned latest; // buffer, or one of the empty states
    unsigned read; // buffer that the owner reads
    uint32_t version;
    uint32_t change; // counts what changes the value
  };
  // Two, so that p can be written to one while the other holds.
  static constexpr unsigned kEmpty = kWriters + kOwners;
  static constexpr unsigned kStates = kEmpty + 2;
  static constexpr unsigned kNone = 15;
  static constexpr unsigned kBits = 4; // of each of the first two
  static constexpr unsigned kVersionBits = 24;
  static constexpr uint32_t kMostVersions = (1U << kVersionBits) - 1; // and it stays there

  static State unpack(uint64_t word);
  static uint64_t pack(const State& state);
  State load() const {
    return unpack(word_.load(std::memory_order_acquire));
  }
  // Replaces the word if it is `seen` still; else `seen` is what it is now.
  bool change(State& seen, State next);

  std::atomic<uint64_t> word_;
  std::array<std::atomic<double>, kStates> p_; // by state
};

} // namespace fog

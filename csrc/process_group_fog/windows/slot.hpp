// The lock-free slot of a window, which holds the value that one rank has written for another.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

namespace fog {

// The state of one slot of a window: which of several buffers holds its value, and which buffer is being read. The
// buffers themselves are elsewhere. A slot lives in memory that its owner and its writer have mapped.
//
// A value is never changed in place. It is written to an unused buffer and then published by a single atomic change of
// one word, so readers never see a partial value, and neither side waits for the other. The owner pins the buffer that
// it reads. The writer therefore needs three buffers: the latest value, one that the owner may still read, and one to
// write to.
//
// The owner replaces the value itself if it gets it from the other rank, or if it takes the value. For replacing, the
// owner has two buffers of its own. For taking, there are states without a buffer, so nothing has to be cleared. A
// writer that adds to the latest value therefore has to check the state when it publishes: a value that the owner has
// taken meanwhile must not be added again, and a value that the owner has replaced may have been overwritten while it
// was read.
//
// Each value comes with p, the push-sum weight, which always belongs to the same state.
class Slot {
 public:
  static constexpr unsigned kWriters = 3; // buffers, numbered from 0
  static constexpr unsigned kOwners = 2; // buffers after the writer's

  // A snapshot of the slot.
  struct View {
    unsigned buffer; // holds the latest value
    bool empty; // there is no value; it counts as zeros
    double p;
    uint32_t change; // number of the state
  };

  // --- for the writer, one thread at a time ---
  // Returns a buffer to write to.
  unsigned writers_buffer() const;
  // Returns whether the owner has probably read the data in that buffer: it has not if it has not read since the last
  // two puts.
  bool may_have_been_read() const {
    return load().version < 2;
  }
  // Replaces the value, and p if given. Counts as a new version, or as several of which only the last one was visible.
  void put(unsigned buffer, std::optional<double> p, uint64_t versions = 1);
  // The value to add to.
  View base() const;
  // Publishes a sum on that base. Returns false if the value has changed since: then the sum may be invalid, and the
  // writer has to add to a new base().
  bool add(unsigned buffer, double p, const View& base);

  // --- for the owner, one thread at a time: it does not replace the value that it reads ---
  unsigned owners_buffer() const;
  // The owner's put().
  void replace(unsigned buffer) {
    put(buffer, std::nullopt);
  }
  // Pins the latest value and resets the version. With `take` the slot is empty from then on; with `take_p` p is reset
  // as well.
  View pin(bool take, bool take_p);
  void unpin();
  void reset_version();
  // The number of puts since the last pin() or reset_version().
  uint32_t version() const;
  double p() const;

  // Initializes the slot before it is shared.
  void start(std::optional<unsigned> buffer);

 private:
  // The state, packed into one word.
  struct State {
    unsigned latest; // buffer, or one of the empty states
    unsigned read; // buffer that the owner reads
    uint32_t version;
    uint32_t change; // counts the changes of the value
  };
  // There are two empty states, so that p can be written for one while the other is current.
  static constexpr unsigned kEmpty = kWriters + kOwners;
  static constexpr unsigned kStates = kEmpty + 2;
  static constexpr unsigned kNone = 15;
  static constexpr unsigned kBits = 4; // for each of the first two
  static constexpr unsigned kVersionBits = 24;
  static constexpr uint32_t kMostVersions = (1U << kVersionBits) - 1; // the counter stops here

  static State unpack(uint64_t word);
  static uint64_t pack(const State& state);
  State load() const {
    return unpack(word_.load(std::memory_order_acquire));
  }
  // Replaces the word if it still is `seen`; otherwise loads the current state into `seen`.
  bool change(State& seen, State next);

  std::atomic<uint64_t> word_;
  std::array<std::atomic<double>, kStates> p_; // by state
};

} // namespace fog

// Counts the uses of each name by named operations.
//
// Ranks may use names in any order and run ahead of each other, so messages say to which use of a name they belong.
// Each rank counts its own uses. To keep the table small, a rank forgets the names that it has not used for the longest
// time. When it uses such a name again, it counts from 0 and tags the count with a new generation. A rank that receives
// a new generation finds out which of its own uses corresponds to it: messages between two ranks arrive in order, so it
// is the next operation of this name here that expects a message from that rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>

namespace fog {

// Names are identified by their keys. Every call needs the engine's lock.
class NameTable {
 public:
  // The number of names that a group always remembers.
  static constexpr size_t kMost = 4096;

  struct Use {
    uint16_t number = 0; // number of earlier uses of this name, modulo 2^16
    uint32_t generation = 0; // 0: no name was forgotten before the first use of this name
  };

  // The next use of a name. Names with `in_flight(key)` are not forgotten.
  template <typename InFlight>
  Use next(uint64_t key, InFlight&& in_flight) {
    auto found = by_key_.find(key);
    if (found == by_key_.end()) {
      forget(in_flight);
      names_.push_front({key, 0, generation_, {}});
      generation_ += generation_ > 0 ? 1 : 0;
      found = by_key_.emplace(key, names_.begin()).first;
    } else {
      names_.splice(names_.begin(), names_, found->second);
    }
    auto& name = *found->second;
    return {name.uses++, name.generation};
  }

  // Returns whether a message of `source`'s use `there` belongs to the latest use of the name here. `expected`: the
  // latest use expects a message from `source`.
  bool is_of_latest(uint64_t key, int source, Use there, bool expected);

  // By how many uses the latest use here is ahead of `source`'s use `there`; nullopt if unknown.
  std::optional<int> uses_since(uint64_t key, int source, Use there) const;

  size_t size() const {
    return names_.size();
  }

 private:
  struct Binding {
    uint32_t generation;
    uint16_t offset; // added to the use numbers of that generation
  };
  struct Name {
    uint64_t key;
    uint16_t uses;
    uint32_t generation;
    std::map<int, Binding> others; // by rank; a rank without an entry has generation 0, as has this rank
  };

  template <typename InFlight>
  void forget(InFlight&& in_flight) {
    auto oldest = names_.end();
    while (names_.size() >= kMost && oldest != names_.begin()) {
      --oldest;
      if (!in_flight(oldest->key)) {
        generation_ += generation_ == 0 ? 1 : 0;
        by_key_.erase(oldest->key);
        oldest = names_.erase(oldest);
      }
    }
  }

  std::list<Name> names_; // most recently used first
  std::unordered_map<uint64_t, std::list<Name>::iterator> by_key_;
  uint32_t generation_ = 0; // of the next name that is not in the table
};

} // namespace fog

// Which use of its name a named operation is.
//
// Ranks may use names in any order, and run ahead of each other, so messages say of which use of a name they are. Each rank counts
// for itself. So that names that are never used again take no memory for ever, a rank forgets those that it has not used for the longest
// time. When it uses such a name again it counts from 0, and says so by another generation of its count: whoever meets that
// finds out which of its own uses the first one is. For messages between two ranks come in order, that is the next operation of this name
// here that expects something from there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>

namespace fog {

// Names stand by their keys. Every call needs the engine's lock.
class NameTable {
 public:
  // Names that a group remembers at least.
  static constexpr size_t kMost = 4096;

  struct Use {
    uint16_t number = 0; // of uses of this name, modulo 2^16
    uint32_t generation = 0; // 0: nothing was forgotten before the name was first used
  };

  // The next use of a name. `in_flight(key)` says which names are not to be forgotten.
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

  // Whether a message of `source`'s use `there` belongs to the latest use of the name here. `expected`: this one expects something
  // from there.
  bool is_of_latest(uint64_t key, int source, Use there, bool expected);

  // How many uses of a name the latest one here comes after `source`'s use `there`; nothing if that cannot be known.
  std::optional<int> uses_since(uint64_t key, int source, Use there) const;

  size_t size() const {
    return names_.size();
  }

 private:
  struct Binding {
    uint32_t generation;
    uint16_t offset; // what is to be added to the numbers of that generation
  };
  struct Name {
    uint64_t key;
    uint16_t uses;
    uint32_t generation;
    std::map<int, Binding> others; // by rank; both have forgotten nothing if there is none
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

  std::list<Name> names_; // the one used last comes first
  std::unordered_map<uint64_t, std::list<Name>::iterator> by_key_;
  uint32_t generation_ = 0; // of the next name that is not there
};

} // namespace fog

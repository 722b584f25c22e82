// Messages that arrived before this rank started their operation, and the memory that they take.
//
// A rank that runs ahead of this one could fill its memory with small messages, whose data comes with the header. So if
// the early messages of a process take more than a limit, it is asked to hold its data back. From then on the data
// stays at the sender until an operation here takes it, as the data of large messages always does, and the sender's
// operation ends only then.
#pragma once

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

#include "transport/message.hpp"

namespace fog {

// Counts the bytes of early messages per process. Every call needs the engine's lock.
class EarlyLoad {
 public:
  void add(int peer_id, size_t bytes);
  void subtract(int peer_id, size_t bytes);
  size_t bytes() const {
    return bytes_;
  }
  // Returns whether take_changes() would return anything.
  bool changed() const {
    return !changed_.empty();
  }
  // Processes whose early messages have exceeded the limit (true), or no longer do (false), since the last call.
  std::vector<std::pair<int, bool>> take_changes();

 private:
  size_t bytes_ = 0;
  std::vector<size_t> loads_; // by world rank
  std::vector<bool> held_;
  std::set<int> changed_;
};

class EarlyMessage {
 public:
  EarlyMessage(EarlyLoad& load, int peer_id, int from, const Header& its_header, const char* its_data);
  ~EarlyMessage();
  EarlyMessage(EarlyMessage&& other) noexcept;
  EarlyMessage& operator=(EarlyMessage&&) = delete;
  EarlyMessage(const EarlyMessage&) = delete;

  const int source; // rank of the group, or of the world if the group does not exist here yet
  const Header header;
  std::vector<char> data; // data that came with the header

 private:
  size_t bytes() const {
    return sizeof(EarlyMessage) + data.capacity();
  }

  EarlyLoad* load_;
  const int peer_id_;
};

} // namespace fog

// A network of virtual ranks: engines in one process that exchange messages through its memory.
//
// It is for tests of algorithms, agreement and failures with hundreds of ranks in one process. Messages between two
// ranks keep their order, as on every transport. Messages of different pairs may overtake each other or be late, and a
// rank may be lost. Large data alternates between being read in place and arriving in chunks, so that tests cover both
// ways.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace fog {

class InProcessNetwork : public std::enable_shared_from_this<InProcessNetwork> {
 public:
  struct Options {
    uint64_t seed = 0;
    unsigned most_delay = 0; // the number of receiver polls by which a message may be late
  };

  // What ranks have sent to each other.
  struct Counts {
    std::map<std::pair<PeerId, PeerId>, std::pair<uint64_t, uint64_t>> sent; // by sender and receiver: messages with data, bytes
    std::vector<uint64_t> failures_told; // by sender: messages that report failures, which may be lost on their way
  };

  InProcessNetwork(int size, Options options);
  // Returns the transport of process `self`; `handler` receives its messages.
  std::unique_ptr<Transport> connect(PeerId self, MessageHandler& handler);

  // Ends `peer` without a goodbye: it receives and sends nothing any more. The others notice this only if `noticed`.
  void lose(PeerId peer, bool noticed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_.insert(peer);
    if (noticed) {
      noticed_.insert(peer);
    }
    for (auto& box : boxes_[static_cast<size_t>(peer)]) {
      in_flight_ -= box.second.size();
    }
    boxes_[static_cast<size_t>(peer)].clear();
  }
  // Returns the number of messages that have not been received.
  size_t in_flight() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_;
  }
  Counts counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }

 private:
  class Endpoint;
  struct Parcel {
    Header header;
    std::shared_ptr<std::vector<char>> data; // behind the header, or of a chunk
    uint64_t due = 0; // the receiver's poll from which it is visible
    uint64_t number = 0; // unique in the network
  };

  void put(PeerId from, PeerId to, Parcel parcel);
  // Returns the messages that have arrived for `to`, in the order of each sender.
  std::vector<std::pair<PeerId, Parcel>> take(PeerId to);

  const int size_;
  const Options options_;
  mutable std::mutex mutex_; // guards the members below
  std::mt19937_64 random_;
  std::vector<std::map<PeerId, std::deque<Parcel>>> boxes_; // by receiver and sender; no queue is empty
  std::vector<uint64_t> looks_; // polls so far, by receiver
  std::set<PeerId> lost_;
  std::set<PeerId> noticed_; // subset of lost_
  std::unordered_set<uint64_t> valid_; // transfers that have not been withdrawn
  uint64_t next_transfer_ = 1;
  uint64_t parcels_ = 0; // number of parcels so far
  size_t in_flight_ = 0;
  Counts counts_;
};

} // namespace fog

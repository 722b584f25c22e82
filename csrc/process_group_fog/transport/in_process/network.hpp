// Processes that are none: engines of one process that exchange messages through its memory.
//
// For tests of algorithms, agreement and failures with hundreds of ranks in one process. Messages between two ranks keep their order, as
// everywhere; those of different pairs may overtake each other, be late, and a rank may be lost. Large data is read where it is, or comes
// in chunks, by turns, so that both ways are tried.
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

#include "transport/in_process/recording.hpp"
#include "transport/transport.hpp"

namespace fog {

class InProcessNetwork : public std::enable_shared_from_this<InProcessNetwork> {
 public:
  struct Options {
    uint64_t seed = 0;
    unsigned most_delay = 0; // looks of the receiver for news that a message may be late
  };

  InProcessNetwork(int size, Options options);
  // That of process `self`, whose messages `handler` takes.
  std::unique_ptr<Transport> connect(PeerId self, MessageHandler& handler);

  // `peer` ends without a goodbye: it takes and sends nothing any more. The others see it if it is `noticed`.
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
  // Messages that have not been taken.
  size_t in_flight() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_flight_;
  }
  // Has recorded() remember what leaves from now on, message by message.
  void record() {
    const std::lock_guard<std::mutex> lock(mutex_);
    recording_.start();
  }
  Recording recorded() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return recording_;
  }

 private:
  class Endpoint;
  struct Parcel {
    Header header;
    std::shared_ptr<std::vector<char>> data; // behind the header, or of a chunk
    uint64_t due = 0; // look of the receiver
    uint64_t number = 0; // of all
    uint64_t message = Recording::kNone;
  };

  void put(PeerId from, PeerId to, Parcel parcel);
  void arrived(uint64_t message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    recording_.arrived(message);
  }
  // What has come for `to`, each sender's in order.
  std::vector<std::pair<PeerId, Parcel>> take(PeerId to);

  const int size_;
  const Options options_;
  mutable std::mutex mutex_; // guards what follows
  std::mt19937_64 random_;
  std::vector<std::map<PeerId, std::deque<Parcel>>> boxes_; // by receiver, by sender; none is empty
  std::vector<uint64_t> looks_; // by receiver
  std::set<PeerId> lost_;
  std::set<PeerId> noticed_; // of those
  std::unordered_set<uint64_t> standing_; // transfers that have not been withdrawn
  uint64_t next_transfer_ = 1;
  uint64_t parcels_ = 0; // ever
  size_t in_flight_ = 0;
  Recording recording_;
};

} // namespace fog

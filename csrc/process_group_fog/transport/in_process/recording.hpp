// What ranks of one process have sent to each other: how much, and, once it is asked for, which message left after which others had come.
//
// A network model can replay this. One run shows an order of events, and not only what an operation needs: what stands in all of several
// runs with different delays is what it needs.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "transport/message.hpp"

namespace fog {

// The network's lock guards it.
class Recording {
 public:
  // Of operations, with the bytes that they are of, from rank to rank.
  struct Sent {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  struct Message {
    int from;
    int to;
    uint64_t bytes;
    uint64_t operation; // its key within the group
    unsigned step; // which message of the operation between these two ranks
    uint64_t arrived_before; // so many of the messages to `from` had come as a whole when it left
  };
  static constexpr uint64_t kNone = ~uint64_t(0);

  explicit Recording(int size) : arrivals_(static_cast<size_t>(size)), failures_told_(static_cast<size_t>(size), 0) {}

  // Remembers messages from now on, and forgets those of before.
  void start() {
    ++start_;
    is_on_ = true;
    messages_.clear();
    for (auto& numbers : arrivals_) {
      numbers.clear();
    }
  }

  // A message is to leave, and may be lost.
  void tried(int from, const Header& header) {
    failures_told_[static_cast<size_t>(from)] += header.kind == MessageKind::kError ? 1 : 0;
  }
  // Which message this is; kNone for those that carry no data of an operation, and where messages are not remembered.
  uint64_t left(int from, int to, const Header& header) {
    if (header.kind != MessageKind::kData && header.kind != MessageKind::kPointToPoint) {
      return kNone;
    }
    auto& sent = sent_[{from, to}];
    sent = {sent.messages + 1, sent.bytes + header.bytes};
    if (!is_on_) {
      return kNone;
    }
    messages_.push_back({from, to, header.bytes, header.key, header.step, arrivals_[static_cast<size_t>(from)].size()});
    return start_ << 32 | (messages_.size() - 1);
  }
  // It has come as a whole.
  void arrived(uint64_t message) {
    if (message != kNone && message >> 32 == start_) {
      const uint64_t place = message & 0xffffffff;
      arrivals_[static_cast<size_t>(messages_[place].to)].push_back(place);
    }
  }

  const std::map<std::pair<int, int>, Sent>& sent() const {
    return sent_;
  }
  // Messages that tell of failures, by sender.
  const std::vector<uint64_t>& failures_told() const {
    return failures_told_;
  }
  // In the order in which they left.
  const std::vector<Message>& messages() const {
    return messages_;
  }
  // Their places in messages(), by receiver, in the order in which they came.
  const std::vector<std::vector<uint64_t>>& arrivals() const {
    return arrivals_;
  }

 private:
  bool is_on_ = false;
  uint64_t start_ = 0; // how often messages were forgotten: those of before may still arrive
  std::vector<Message> messages_;
  std::vector<std::vector<uint64_t>> arrivals_;
  std::map<std::pair<int, int>, Sent> sent_;
  std::vector<uint64_t> failures_told_;
};

} // namespace fog

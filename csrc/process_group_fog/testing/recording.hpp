// Messages that ranks of one process have sent to each other: totals, and on request each message with its order.
//
// A network model can replay the order. One run shows an order of events, but not what an operation requires. The order that
// is the same in several runs with different delays is what it requires.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "transport/message.hpp"

namespace fog {

// The caller holds the lock of the network.
class Recording {
 public:
  // Messages of operations and their bytes, from one rank to another.
  struct Sent {
    uint64_t messages = 0;
    uint64_t bytes = 0;
  };
  struct Message {
    int from;
    int to;
    uint64_t bytes;
    uint64_t operation; // key of the operation in its group
    unsigned step; // number of the message between these two ranks, in its operation
    uint64_t arrived_before; // number of messages that had completely arrived at `from` when it left
  };
  static constexpr uint64_t kNone = ~uint64_t(0);

  explicit Recording(int size) : arrivals_(static_cast<size_t>(size)), failures_told_(static_cast<size_t>(size), 0) {}

  // Records each message from now on and drops earlier ones.
  void start() {
    ++start_;
    is_on_ = true;
    messages_.clear();
    for (auto& numbers : arrivals_) {
      numbers.clear();
    }
  }

  // Counts a message that may be lost on its way.
  void tried(int from, const Header& header) {
    failures_told_[static_cast<size_t>(from)] += header.kind == MessageKind::kError ? 1 : 0;
  }
  // Returns a number for the message; kNone if it has no data of an operation, or if messages are not recorded.
  uint64_t left(int from, int to, const Header& header) {
    if (header.kind != MessageKind::kData && header.kind != MessageKind::kPointToPoint) {
      return kNone;
    }
    auto& sent = sent_[{from, to}];
    sent = {sent.messages + 1, sent.bytes + header.bytes};
    if (!is_on_) {
      return kNone;
    }
    messages_.push_back(
        {from, to, header.bytes, header.operation.key, header.operation.step, arrivals_[static_cast<size_t>(from)].size()});
    return start_ << 32 | (messages_.size() - 1);
  }
  // The message with this number has completely arrived.
  void arrived(uint64_t message) {
    if (message != kNone && message >> 32 == start_) {
      const uint64_t place = message & 0xffffffff;
      arrivals_[static_cast<size_t>(messages_[place].to)].push_back(place);
    }
  }

  const std::map<std::pair<int, int>, Sent>& sent() const {
    return sent_;
  }
  // Number of messages that report failures, by sender.
  const std::vector<uint64_t>& failures_told() const {
    return failures_told_;
  }
  // Messages in the order in which they left.
  const std::vector<Message>& messages() const {
    return messages_;
  }
  // Indices in messages(), by receiver, in the order of arrival.
  const std::vector<std::vector<uint64_t>>& arrivals() const {
    return arrivals_;
  }

 private:
  bool is_on_ = false;
  uint64_t start_ = 0; // number of calls of start(); earlier messages may still arrive
  std::vector<Message> messages_;
  std::vector<std::vector<uint64_t>> arrivals_;
  std::map<std::pair<int, int>, Sent> sent_;
  std::vector<uint64_t> failures_told_;
};

} // namespace fog

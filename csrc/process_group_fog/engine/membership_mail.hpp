// Messages about who is a member of the job. Python decides what they say (fogdist.elastic), and the engine carries them:
// they go from process to process over the connections of the job, whatever has become of the groups, and wait in the
// receiver until its program takes them.
//
// A message tells the epoch that its sender knows. A rank that knows what was decided in that epoch answers by its engine,
// even while its program computes. Messages may be lost, so their senders repeat them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/message.hpp"

namespace fog {

// The received messages of a process, and what it answers. Every call needs the engine's lock.
class MembershipMail {
 public:
  using Message = std::pair<int, std::string>; // with the world rank of the sender
  struct Answer {
    uint64_t epoch; // goes to those whose message tells no later one
    std::string text;
  };

  // Adds a part of a message of `source`; returns whether that message is complete now. The oldest messages give way if
  // they are too many.
  bool add(int source, const Header& header, const char* data);
  std::vector<Message> take();
  bool empty() const {
    return messages_.empty();
  }
  // Another process has that rank from now on.
  void forget(int source);

  std::optional<Answer> answer;

 private:
  static constexpr size_t kMostMessages = 4096;
  static constexpr size_t kMostBytes = size_t(16) << 20;

  std::unordered_map<int, std::string> begun_; // messages whose last part has not come, by sender
  std::deque<Message> messages_; // oldest first
  size_t bytes_ = 0; // in messages_
};

} // namespace fog

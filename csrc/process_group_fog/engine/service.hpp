// What the engine drives beside operations: whatever answers messages of other ranks at any time, as windows do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.hpp"
#include "engine/group.hpp"

namespace fog {

// Every call has the engine's lock, but those of Task::run() and of what take_calls() and on_closing() return.
class Service {
 public:
  // Work that is done without the lock, and handed to finish() afterwards, whatever came of it.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run() noexcept = 0;
  };

  virtual ~Service() = default;

  // A message of kind kWindow or kWindowReply.
  virtual void on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) = 0;
  // `peer` takes no further part in the group.
  virtual void on_gone(const Group& group, int peer, const std::string& how) = 0;
  // A group that is closed here is closed there as well: nothing of it comes from that process any more.
  virtual void on_closed_too(uint64_t group, PeerId peer) = 0;
  // The group is about to be closed: what is to be called before, without the lock.
  virtual std::vector<std::function<void()>> on_closing(const Group& group) = 0;
  // Everything in flight fails: in all groups, or in one.
  virtual void fail_all(const std::string& reason) = 0;
  virtual void fail_group(const Group& group, const std::string& reason) = 0;
  // Fails what is over its deadline. Returns the earliest that is left.
  virtual Deadline check_deadlines(Deadline now) = 0;

  // One round of progress.
  virtual void advance() = 0;
  // Null if there is none.
  virtual std::shared_ptr<Task> next_task() = 0;
  virtual void finish(const std::shared_ptr<Task>& task) = 0;
  // What has ended, to be called without the lock.
  virtual std::vector<std::function<void()>> take_calls() = 0;
  // What must be released without the lock.
  virtual std::vector<std::shared_ptr<void>> take_released() = 0;

  // Whether something is on its way to or from this process.
  virtual bool busy() const = 0;
  // Whether messages may come at any time.
  virtual bool listening() const = 0;
};

} // namespace fog

// Interface of a service that the engine drives beside operations and that answers messages of other ranks at any time.
// Windows implement it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/deadline.hpp"
#include "engine/group.hpp"

namespace fog {

// Every function is called with the engine's lock, except Task::run() and the functions that take_calls() and
// on_closing() return.
class Service {
 public:
  // Work that is done without the lock; afterwards finish() is called in any case.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run() noexcept = 0;
  };

  virtual ~Service() = default;

  // Handles a message of kind kWindow or kWindowReply.
  virtual void on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) = 0;
  // `peer` takes no further part in the group.
  virtual void on_gone(const Group& group, int peer, const std::string& how) = 0;
  // Others count this process as lost: it uses their memory no more.
  virtual void on_expelled(const Group& group, const std::string& reason) = 0;
  // Returns the peers that it uses, whose end or hang concerns it.
  virtual std::vector<PeerId> watched() const = 0;
  // A group that is closed here is closed in that process as well, so it sends no more messages for the group.
  virtual void on_closed_too(uint64_t group, PeerId peer) = 0;
  // The group is about to be closed. Returns functions to call before, without the lock.
  virtual std::vector<std::function<void()>> on_closing(const Group& group) = 0;
  // Fails all operations in flight, of all groups or of one.
  virtual void fail_all(const std::string& reason) = 0;
  virtual void fail_group(const Group& group, const std::string& reason) = 0;
  // Fails operations whose deadline has passed. Returns the earliest remaining deadline.
  virtual Deadline check_deadlines(Deadline now) = 0;

  // Makes one round of progress.
  virtual void advance() = 0;
  // The next task, or null.
  virtual std::shared_ptr<Task> next_task() = 0;
  virtual void finish(const std::shared_ptr<Task>& task) = 0;
  // Functions that report the end of operations, to be called without the lock.
  virtual std::vector<std::function<void()>> take_calls() = 0;
  // Objects to be released without the lock.
  virtual std::vector<std::shared_ptr<void>> take_released() = 0;

  // Returns whether any transfer to or from this process is in progress.
  virtual bool busy() const = 0;
  // Returns whether messages may come at any time.
  virtual bool listening() const = 0;
};

} // namespace fog

// Window operations by messages: between hosts, and if memory cannot be mapped.
//
// The origin sends a request; the target's engine executes it and replies, without the target's program. Requests of
// one origin for one window are done in the order in which they were sent. A failed request affects neither the group
// nor other requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "core/deadline.hpp"
#include "engine/engine.hpp"
#include "engine/service.hpp"
#include "transport/transport.hpp"
#include "windows/window_descriptions.hpp"
#include "windows/window_memory.hpp"

namespace fog {

class Window;
class WindowService;

// A request of one rank to another. The caller sets the public members.
class WindowRequest final : public TransferOwner {
 public:
  std::shared_ptr<Group> group;
  uint64_t window = 0;
  int peer = 0;
  WindowOp op = WindowOp::kPut;
  double weight = 1.0;
  std::optional<double> p;
  size_t offset = 0; // for kWrite
  size_t reply_bytes = 0; // the size of the target's reply
  bool mutex = false; // the target holds the pair's mutex during the operation
  uint64_t puts = 0; // for kAccumulate: see MailboxReader
  at::Tensor data; // to send, contiguous
  bool waits = false; // the caller waits for it next
  std::string what; // for errors: "Window.put of window 'a' of group 'default' from rank 0 to rank 1"
  // Both are called at the end, without the engine's lock: take() with the data of a get, done() in every case.
  std::function<void(const void* data)> take;
  std::function<void(std::exception_ptr error)> done;

 private:
  friend class WindowService;
  void on_progress() override;
  // Returns whether its data has been sent and the reply's data has come.
  bool moved() const;

  WindowService* service_ = nullptr;
  uint64_t id_ = 0;
  std::chrono::steady_clock::time_point deadline_;
  std::chrono::milliseconds timeout_{0};
  std::shared_ptr<Outgoing> outgoing_;
  std::shared_ptr<Incoming> incoming_;
  bool replied_ = false;
  c10::DataPtr received_; // a get's data
};

class WindowService final : public Service {
 public:
  explicit WindowService(Engine& engine) : engine_(engine) {}
  // The service of the group's engine.
  static WindowService& of(const Group& group) {
    return static_cast<WindowService&>(group.engine.service());
  }

  // --- for windows, without the engine's lock ---
  // The first number that no window of the group has had here. Throws DistBackendError if the group takes no more work.
  uint64_t next_window(const Group& group);
  // Registers a window under a number that is the same on all ranks. Its memory has controls for these neighbors.
  // Throws as next_window() does.
  void open(
      const std::shared_ptr<Group>& group,
      uint64_t number,
      const std::shared_ptr<Window>& window,
      std::shared_ptr<WindowMemory> memory,
      const std::vector<int>& neighbors);
  // Messages for the window may come from now on. The `tellers` write to its memory one-sidedly: they tell this rank
  // when they have left it, before they close their group.
  void listen(const Group& group, uint64_t number, std::vector<PeerId> tellers);
  void close(const Group& group, uint64_t number);
  // Returns whether an open window's tensor is in that storage.
  bool has_window_of(const c10::Storage& storage);
  // Sends a request. Throws DistBackendError if the peer has gone; in every other case `request->done` will be called.
  void request(const std::shared_ptr<WindowRequest>& request, std::chrono::milliseconds timeout);
  // Cancels a request: its `done` will not be called, unless it has been.
  void forget(const WindowRequest& request);
  // Sends a request without a reply.
  void tell(const Group& group, uint64_t window, int peer, WindowOp op);

  // --- for the engine ---
  void on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) override;
  void on_gone(const Group& group, int peer, const std::string& how) override;
  void on_expelled(const Group& group, const std::string& reason) override;
  std::vector<PeerId> watched() const override;
  void on_closed_too(uint64_t group, PeerId peer) override {
    on_left_group(group, peer);
  }
  std::vector<std::function<void()>> on_closing(const Group& group) override;
  void fail_all(const std::string& reason) override;
  void fail_group(const Group& group, const std::string& reason) override;
  Deadline check_deadlines(Deadline now) override;
  void advance() override;
  std::shared_ptr<Task> next_task() override;
  void finish(const std::shared_ptr<Task>& task) override;
  std::vector<std::function<void()>> take_calls() override {
    return std::exchange(calls_, {});
  }
  std::vector<std::shared_ptr<void>> take_released() override {
    return std::exchange(released_, {});
  }
  bool busy() const override {
    return !requests_.empty() || !active_.empty() || !tasks_.empty() || running_ > 0;
  }
  bool listening() const override {
    return listening_ > 0;
  }

 private:
  friend class WindowRequest;
  class Serving;
  class ServingTask;
  using Origin = std::tuple<uint64_t, uint64_t, int>; // group, window, source
  enum class Hold { kNone, kOperation, kUser };
  struct Entry {
    std::weak_ptr<Window> window;
    std::shared_ptr<WindowMemory> memory; // for neighbors that leave it, also while the window is being destroyed
    std::vector<PeerId> peers; // the neighbors, in the order of the memory's controls
    std::vector<PeerId> tellers; // the peers that write one-sidedly and tell when they stop
    bool listens = false;

    void leave(PeerId peer) const {
      if (const size_t place = index_of(peers, peer); place < peers.size()) {
        memory->leave(place);
      }
    }
  };
  // The requests of one rank for one of this rank's windows.
  struct Queue {
    std::shared_ptr<Group> group;
    int source = 0;
    std::weak_ptr<Window> window;
    std::deque<std::shared_ptr<Serving>> servings; // in order
    std::deque<Header> locks; // not ordered with the other requests
    Hold hold = Hold::kNone;
    bool queued = false; // for the mutex
  };

  static Header header_for(MessageKind kind, uint64_t group, uint64_t window, WindowOp op, uint64_t request);

  // --- as the origin ---
  void send_request(const std::shared_ptr<WindowRequest>& request);
  void tell_now(const Group& group, uint64_t window, int peer, WindowOp op);
  void on_reply(PeerId source, const Header& header, const char* data);
  void settle(const std::shared_ptr<WindowRequest>& request);
  // Stores the request in the call that reports its end, so that its tensor is released without the lock. By value: the
  // caller may have it from requests_.
  void end(std::shared_ptr<WindowRequest> request, std::exception_ptr error);
  // Fails it with the error "fog: " + `what` + `reason`.
  void fail(const std::shared_ptr<WindowRequest>& request, const std::string& reason);
  // Fails the requests for which `concerned` returns true.
  void fail_those(const std::string& reason, const std::function<bool(const WindowRequest& request)>& concerned);

  // --- as the target ---
  void on_request(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  // Takes its data, which came with the header or is received from now on; sets the request's `error` if that
  // fails.
  void take_data(const Queue& queue, const std::shared_ptr<Serving>& serving, const char* data);
  std::vector<std::shared_ptr<Window>> windows_of(const Group& group);
  std::shared_ptr<Window> lock(const std::weak_ptr<Window>& window);
  // Returns false once it only waits for new messages.
  bool advance(const Origin& origin, Queue& queue);
  // Returns whether the engine holds the pair's mutex for the source.
  bool obtain(Queue& queue, Window& window, Hold hold);
  void release(Queue& queue);
  // The source has ended its use of the window, which may have been dropped here, or of all windows of the group.
  void on_left(const Queue& queue, uint64_t window);
  void on_left_group(uint64_t group, PeerId peer);
  void reply(const Queue& queue, const Header& request, const std::string& error, const std::shared_ptr<Serving>& data = nullptr);

  Engine& engine_;
  std::map<std::pair<uint64_t, uint64_t>, Entry> windows_; // by group and number
  std::unordered_map<uint64_t, std::shared_ptr<WindowRequest>> requests_; // by id
  uint64_t next_request_ = 1;
  std::map<Origin, Queue> queues_;
  std::set<Origin> active_; // queues with work to do
  std::deque<std::shared_ptr<ServingTask>> tasks_;
  size_t running_ = 0;
  size_t listening_ = 0;
  std::vector<std::function<void()>> calls_;
  std::vector<std::shared_ptr<void>> released_; // windows, because this may be the last reference
};

} // namespace fog

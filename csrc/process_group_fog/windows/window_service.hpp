// Operations on windows that go by messages: between hosts, and wherever memory cannot be mapped.
//
// The origin sends a request; the target's engine does what it asks for and replies. Requests of one origin for one window
// are done in the order in which they were sent. The target's program takes no part. What fails, fails alone: neither the group nor another
// request suffers.
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

// What one rank asks of another. The first members are the caller's.
class WindowRequest final : public TransferOwner {
 public:
  std::shared_ptr<Group> group;
  uint64_t window = 0;
  int peer = 0;
  WindowOp op = WindowOp::kPut;
  double weight = 1.0;
  std::optional<double> p;
  size_t offset = 0; // of kWrite
  size_t reply_bytes = 0; // that the target has to reply with
  bool mutex = false; // the target holds the pair's mutex meanwhile
  uint64_t puts = 0; // of kAccumulate: see MailboxReader
  at::Tensor data; // to send, contiguous
  std::string what; // for errors: "win_put of window 'a' of group 'default' from rank 0 to rank 1"
  // Both are called without the engine's lock, at the end: the first with the data of a get, the second in every case.
  std::function<void(const void* data)> take;
  std::function<void(std::exception_ptr error)> done;

 private:
  friend class WindowService;
  void on_progress() override;
  // Whether its data has gone, and that of the reply has come.
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
  // That of the group's engine.
  static WindowService& of(const Group& group) {
    return static_cast<WindowService&>(group.engine.service());
  }

  // --- for windows, without the engine's lock ---
  // The first number that no window of the group has had here. Throws DistBackendError if the group takes no more work.
  uint64_t next_window(const Group& group);
  // Makes a window known by a number that is the same on all ranks, with its memory, which has places for these neighbors. Throws as
  // next_window() does.
  void open(
      const std::shared_ptr<Group>& group,
      uint64_t number,
      const std::shared_ptr<Window>& window,
      std::shared_ptr<WindowMemory> memory,
      const std::vector<int>& neighbors);
  // Messages may come for it, from now on. `tellers` write to its memory one-sidedly: they tell this rank when they have left it, before they
  // close their group.
  void listen(const Group& group, uint64_t number, std::vector<PeerId> tellers);
  void close(const Group& group, uint64_t number);
  // Whether an open window's tensor is in that storage.
  bool has_window_of(const c10::Storage& storage);
  // Asks another rank. Throws DistBackendError if it is gone; `request->done` will be called in every other case.
  void request(const std::shared_ptr<WindowRequest>& request, std::chrono::milliseconds timeout);
  // Nobody waits for it any more: `done` will not be called, if it was not.
  void forget(const WindowRequest& request);
  // Tells another rank what expects no reply.
  void tell(const Group& group, uint64_t window, int peer, WindowOp op);

  // --- for the engine ---
  void on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) override;
  void on_gone(const Group& group, int peer, const std::string& how) override;
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
    std::shared_ptr<WindowMemory> memory; // for neighbors that leave it, also while the window is on its way out
    std::vector<PeerId> peers; // that it has places for
    std::vector<PeerId> tellers; // of them: who writes there and says so once it does not any more
    bool listens = false;

    void leave(PeerId peer) const {
      if (const size_t place = index_of(peers, peer); place < peers.size()) {
        memory->leave(place);
      }
    }
  };
  // What one rank asks of one of this rank's windows.
  struct Queue {
    std::shared_ptr<Group> group;
    int source = 0;
    std::weak_ptr<Window> window;
    std::deque<std::shared_ptr<Serving>> servings; // in order
    std::deque<Header> locks; // which need not wait for those
    Hold hold = Hold::kNone;
    bool queued = false; // for the mutex
  };

  // What the header's fields mean here: step: WindowOp; key: the window; transfer: the request; scale: the weight; address: p,
  // or the offset; flags: these, or in a reply whether the data is the text of an error; the signature's numel: of an accumulate, how many
  // puts its origin had made one-sidedly before it (the rest of the signature says nothing).
  static constexpr uint32_t kHasP = 1;
  static constexpr uint32_t kNeedsMutex = 2;
  static Header header_for(MessageKind kind, uint64_t group, uint64_t window, WindowOp op, uint64_t request);

  // --- as the origin ---
  void send_request(const std::shared_ptr<WindowRequest>& request);
  void tell_now(const Group& group, uint64_t window, int peer, WindowOp op);
  void on_reply(PeerId source, const Header& header, const char* data);
  void settle(const std::shared_ptr<WindowRequest>& request);
  // The call that ends it holds it, so that its tensor is released without the lock.
  void end(const std::shared_ptr<WindowRequest>& request, std::exception_ptr error);
  // With the error "fog: " + what it is + `reason`.
  void fail(const std::shared_ptr<WindowRequest>& request, const std::string& reason);
  // Those for which `concerned` says so.
  void fail_those(const std::string& reason, const std::function<bool(const WindowRequest& request)>& concerned);

  // --- as the target ---
  void on_request(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  // Its data, which has come with the header or else comes from now on, unless its `error` says why not.
  void take_data(const Queue& queue, const std::shared_ptr<Serving>& serving, const char* data);
  std::vector<std::shared_ptr<Window>> windows_of(const Group& group);
  std::shared_ptr<Window> lock(const std::weak_ptr<Window>& window);
  // False once it has nothing to wait for but new messages.
  bool advance(const Origin& origin, Queue& queue);
  // True once the engine holds the pair's mutex for the source.
  bool obtain(Queue& queue, Window& window, Hold hold);
  void release(Queue& queue);
  // The source has ended its use of the window, which may have been dropped here; or of all of the group.
  void on_left(const Queue& queue, uint64_t window);
  void on_left_group(uint64_t group, PeerId peer);
  void reply(const Queue& queue, const Header& request, const std::string& error, const std::shared_ptr<Serving>& data = nullptr);

  Engine& engine_;
  std::map<std::pair<uint64_t, uint64_t>, Entry> windows_; // by group and number
  std::unordered_map<uint64_t, std::shared_ptr<WindowRequest>> requests_; // by id
  uint64_t next_request_ = 1;
  std::map<Origin, Queue> queues_;
  std::set<Origin> active_; // whose queues have something to do
  std::deque<std::shared_ptr<ServingTask>> tasks_;
  size_t running_ = 0;
  size_t listening_ = 0;
  std::vector<std::function<void()>> calls_;
  std::vector<std::shared_ptr<void>> released_; // windows: this may turn out to be the last reference
};

} // namespace fog

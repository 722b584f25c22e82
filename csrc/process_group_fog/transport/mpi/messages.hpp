// Messages over MPI point-to-point: to other hosts, and to ranks with which memory cannot be shared.
//
// A header, with small data behind it, is one message, found by a probe. Large data follows with its own tag, in parts:
// received parts can be used while the rest is on its way, and MPI has only a few parts at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "job/mpi_api.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"
#include "transport/mpi/look_times.hpp"
#include "transport/wire.hpp"

namespace fog::mpi {

// Every call needs the engine's lock.
class Messages final : public Wire {
 public:
  Messages(Runtime& runtime, MessageHandler& handler, Watchdog& watchdog);
  ~Messages() override;

  void send(PeerId destination, const Header& header, const void* data, size_t bytes) override;
  uint32_t next_tag(PeerId destination) override;
  // `held`: MPI must not report it as sent before the receiver has asked for it. `waits`: MPI gets it only after go().
  void send_data(
      PeerId destination,
      uint32_t tag,
      const void* data,
      size_t bytes,
      bool held,
      bool waits,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent) override;
  void go(const TransferOwner& owner, std::optional<PeerId> destination) override;
  std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) override;
  // Tracks a request that another part has begun after make_room(). `large`: its data may take a while.
  void follow(MPI_Request request, bool large, Sent ended);
  // Reserves room for one transfer before it starts, so that track() cannot fail: otherwise MPI could access memory
  // that is not kept alive.
  void make_room();
  // Records that other parts may send to that peer or get from it.
  void speak_with(PeerId peer) {
    unsent_[peer];
  }
  void abandon(const TransferOwner& owner) override;

  bool poll() override;
  // Keeps polling for a while after a message to ranks of this host: MPI may report it as sent and still hold it.
  void look_further() {
    polled_until_ = Clock::now() + kPolledFurther;
  }
  bool must_poll() const override {
    return !given_up_ && (!requests_.empty() || !sources_waiting_.empty() || !held_.empty() || polls_further());
  }
  bool sending() const override {
    return sending_ > 0 || (!given_up_ && (!held_.empty() || polls_further()));
  }
  bool has_spoken_with(PeerId peer) const override {
    return unsent_.count(peer) > 0 || arriving_.count(peer) > 0;
  }
  // Small messages that MPI still reads.
  size_t unsent(PeerId destination) const override {
    const auto found = unsent_.find(destination);
    return found == unsent_.end() ? 0 : found->second;
  }
  // in_parts(): data is on its way in parts. moved(): some of it moved at the last look.
  bool in_parts() const {
    return parts_ > 0;
  }
  bool moved() const {
    return moved_;
  }
  // Returns whether a call of MPI has not returned, so that no other call can follow.
  bool broken() const {
    return watchdog_.broken();
  }
  // Records that MPI cannot be called any more. Returns false if this was known.
  bool give_up();
  std::vector<std::shared_ptr<TransferOwner>>& released() override {
    return released_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kControlTag = 0;
  static constexpr auto kPolledFurther = std::chrono::seconds(1);
  using Buffer = std::vector<char>;

  class Data;
  class OutgoingData;
  class IncomingData;
  // The purpose of one MPI request.
  struct Transfer {
    std::unique_ptr<Buffer> buffer; // for a small message
    std::shared_ptr<Data> data; // for a part of data
    size_t part = 0;
    PeerId destination = -1; // of a small message
    Sent ended = nullptr; // for a request of another part
    bool large = false; // that request has large data

    bool is_data() const {
      return data || large;
    }
  };
  // A message to a peer of which it is not known yet whether it runs. MPI must not send to a process that has ended.
  struct Held {
    std::unique_ptr<Buffer> buffer; // of a small message; null if `data` is set
    size_t length = 0;
    std::shared_ptr<Data> data;
  };
  struct Arriving {
    MPI_Request request;
    std::unique_ptr<Buffer> buffer;
    size_t length;
  };

  bool polls_further() const {
    return polled_until_ != Clock::time_point() && Clock::now() < polled_until_;
  }
  int mpi_rank(PeerId peer) const {
    return peer; // processes that have not started as MPI's world are reached by TCP
  }
  void check_reachable(PeerId destination) const;
  // Returns whether messages to that peer must be held, for order behind those that are held already.
  bool holds(PeerId destination) const {
    return held_.count(destination) > 0 || !handler_.may_send(destination);
  }
  bool send_held();
  void send_now(PeerId destination, std::unique_ptr<Buffer> buffer, size_t length);
  void start_or_hold(const std::shared_ptr<Data>& data);
  std::unique_ptr<Buffer> take_buffer();
  void give_buffer(std::unique_ptr<Buffer> buffer);
  void track(MPI_Request request, Transfer transfer);
  bool test(MPI_Request& request, PeerId peer);
  bool poll_messages();
  bool poll_transfers();
  bool drain(PeerId source);

  Runtime& runtime_;
  MessageHandler& handler_;
  Watchdog& watchdog_;
  Clock::time_point polled_until_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unordered_map<PeerId, uint32_t> tags_;
  std::unordered_map<PeerId, std::deque<Arriving>> arriving_; // messages with MPI still receiving, in order
  std::vector<PeerId> sources_waiting_;
  std::vector<MPI_Request> requests_;
  std::vector<Transfer> transfers_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::pair<int, int>> done_; // index of a request, and MPI's error
  std::vector<std::pair<Transfer, int>> ended_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  size_t sending_ = 0;
  size_t parts_ = 0; // parts of data that MPI has
  LookTimes look_times_;
  bool moved_ = false;
  std::unordered_map<PeerId, size_t> unsent_;
  bool given_up_ = false;
  std::vector<std::weak_ptr<IncomingData>> coming_; // weak, because its owners let it go without the engine's lock
  std::unordered_map<PeerId, std::vector<Held>> held_; // no queue is empty
  std::vector<std::shared_ptr<Data>> deferred_; // data that MPI has not got yet
  std::vector<Transfer> lost_transfers_; // transfers whose memory MPI may use forever
};

} // namespace fog::mpi

// Messages over MPI point-to-point: to other hosts, and wherever memory cannot be shared.
//
// A header, with small data behind it, is a message of its own, probed for. Large data follows on a tag of its own, in parts: what has
// come can be used while the rest is on its way, and no more than some parts are with MPI at any time.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "job/mpi_api.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"
#include "transport/mpi/look_times.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {

// Every call needs the engine's lock.
class Messages {
 public:
  Messages(Runtime& runtime, MessageHandler& handler, Watchdog& watchdog);
  ~Messages();

  // Who is to hear how it ends that a peer does not read memory any more; an empty text is success.
  using Sent = std::function<void(const std::string& error)>;

  // A header with data, which is copied, or with none.
  void send(PeerId destination, const Header& header, const void* data, size_t bytes);
  // Number for the data of a message, one after the other: a receiver may take those of one sender in any order.
  uint32_t next_tag(PeerId destination);
  // Data of a message with that tag. `held`: MPI is not to call it sent before the receiver has asked for it. `waits`: MPI gets it when
  // go() says so.
  void send_data(
      PeerId destination,
      uint32_t tag,
      const void* data,
      size_t bytes,
      bool held,
      bool waits,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent);
  // What `owner` sends, to that peer if there is one, waits no more for a go.
  void go(const TransferOwner& owner, std::optional<PeerId> destination);
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner);
  // Looks after a request that somebody else has begun, after make_room(). `large`: of data that may take a while.
  void follow(MPI_Request request, bool large, Sent ended);
  // MPI must not be at memory that nobody keeps: before a transfer starts there is room for it, so that track() cannot fail.
  void make_room();
  // Others may send to that peer, or get from there.
  void speak_with(PeerId peer) {
    unsent_[peer];
  }
  // `owner` reads nothing any more.
  void abandon(const TransferOwner& owner);

  bool poll();
  // Something has been sent to this host's ranks: MPI may call it sent and still hold it, so it is looked after a while longer.
  void look_further() {
    polled_until_ = Clock::now() + kPolledFurther;
  }
  bool must_poll() const {
    return !given_up_ && (!requests_.empty() || !sources_waiting_.empty() || !held_.empty() || polls_further());
  }
  bool sending() const {
    return sending_ > 0 || (!given_up_ && (!held_.empty() || polls_further()));
  }
  // Whether anything went there, or came from there.
  bool has_spoken_with(PeerId peer) const {
    return unsent_.count(peer) > 0 || arriving_.count(peer) > 0;
  }
  // Bytes of small messages to a peer that MPI still reads.
  size_t unsent(PeerId destination) const {
    const auto found = unsent_.find(destination);
    return found == unsent_.end() ? 0 : found->second;
  }
  // Whether data is on its way in parts; whether some of it moved at the last look.
  bool in_parts() const {
    return parts_ > 0;
  }
  bool moved() const {
    return moved_;
  }
  // Whether a call of MPI has not returned, so that no other can follow.
  bool broken() const {
    return watchdog_.broken();
  }
  // MPI cannot be called any more. False if that was known.
  bool give_up();
  std::vector<std::shared_ptr<TransferOwner>>& released() {
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
  // What one request of MPI is for.
  struct Transfer {
    std::unique_ptr<Buffer> buffer; // of a small message; or
    std::shared_ptr<Data> data; // a part of this
    size_t part = 0;
    PeerId destination = -1; // of a small message
    Sent ended = nullptr; // of what is somebody else's
    bool large = false; // that

    bool is_data() const {
      return data || large;
    }
  };
  // What goes to a peer of which it is not known yet whether it is there: MPI must not be asked to send to one that has ended.
  struct Held {
    std::unique_ptr<Buffer> buffer; // of a small message; or
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
    return peer; // all processes of the job have started as MPI's world; one that joins later cannot be reached by MPI
  }
  void check_reachable(PeerId destination) const;
  // Whether what goes there is to be held, behind what is held already.
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
  std::unordered_map<PeerId, std::deque<Arriving>> arriving_; // messages whose data is not here yet, in order
  std::vector<PeerId> sources_waiting_;
  std::vector<MPI_Request> requests_;
  std::vector<Transfer> transfers_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::pair<int, int>> done_; // index of a request, and MPI's error
  std::vector<std::pair<Transfer, int>> ended_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  size_t sending_ = 0;
  size_t parts_ = 0; // of data, with MPI
  LookTimes look_times_;
  bool moved_ = false;
  std::unordered_map<PeerId, size_t> unsent_;
  bool given_up_ = false;
  std::unordered_set<IncomingData*> coming_;
  std::unordered_map<PeerId, std::vector<Held>> held_; // none is empty
  std::vector<std::shared_ptr<Data>> deferred_; // which MPI has not got yet
  std::vector<Transfer> lost_transfers_; // whose memory MPI may use for ever
};

} // namespace fog::mpi

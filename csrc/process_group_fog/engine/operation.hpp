// One operation in flight: a small state machine over messages.
//
// An algorithm derives from Operation. launch() posts its first sends and receives; advance() is called after each event
// and says whether to wait, to compute (outside of the engine's lock) or that the operation is done. It names its peers by
// group rank and never sees the engine.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "core/deadline.hpp"
#include "core/machines.hpp"
#include "core/signature.hpp"
#include "engine/inquiry.hpp"
#include "engine/operation_times.hpp"
#include "engine/work.hpp"
#include "transport/transport.hpp"
#include "engine/name_table.hpp"

namespace fog {

class Group;

class Operation : public TransferOwner, public std::enable_shared_from_this<Operation> {
 public:
  enum class Action { kWait, kCompute, kDone };

  explicit Operation(Signature signature) : signature_(signature) {}

  // --- for whoever makes it ---
  // Tensors whose memory the operation uses; kept until it ends.
  void keep(const at::Tensor& tensor) {
    kept_.push_back(tensor);
  }
  // Runs after success, before the Work completes, outside of the engine's lock: copies staged results to their places.
  void set_epilogue(std::function<void()> epilogue) {
    epilogue_ = std::move(epilogue);
  }
  void set_work(c10::intrusive_ptr<WorkFog> work) {
    work_ = std::move(work);
  }
  // Whether senders wait until the receiver has accepted their messages, where they would not learn of it otherwise.
  void set_confirm(bool confirm) {
    confirm_ = confirm;
  }

  // --- for the engine ---
  void begin(
      const std::shared_ptr<Group>& group,
      uint64_t key,
      uint64_t sequence,
      std::chrono::milliseconds timeout,
      Deadline deadline,
      NameTable::Use use = {});
  void on_message(int source, const Header& header, const char* data);
  void on_confirm(int source);
  void on_progress() final;
  // advance(), and kWait instead of kDone while memory is in use or a confirmation is missing; kCompute also when data is
  // to be copied from other processes.
  Action step();
  // What step() asked for with kCompute, without the lock; settle() follows with the lock, also if the operation has ended.
  void run();
  void settle();
  // Whether run() computes; else it copies.
  bool computes() const {
    return task_ == Task::kCompute;
  }
  // Copies results to their places and completes the Work.
  void finish(std::exception_ptr error);
  // Ends it without completing; later events are ignored.
  void retire() {
    state_ = State::kEnded;
  }

  bool ended() const {
    return state_ == State::kEnded;
  }
  bool computing = false; // a thread is in run()
  bool failing = false; // it takes no further step
  std::exception_ptr late_error; // with which it ended meanwhile: finish() follows once that thread has left
  bool queued = false; // for a step()
  std::unique_ptr<Inquiry> inquiry; // after its deadline
  bool asked_early = false; // those that it waits for, before
  std::unique_ptr<OperationTimes> times; // while somebody observes
  uint64_t flight = 0; // its number in the flight record
  Deadline next_note = {}; // when a wait is noted there again
  bool warned = false; // that it waits long
  Deadline watched = {}; // when those that it waits for were looked at last
  uint64_t key() const {
    return key_;
  }
  // Which use of its name it is; 0 without a name.
  uint64_t use() const {
    return use_.number;
  }
  uint64_t sequence() const {
    return sequence_;
  }
  std::chrono::steady_clock::time_point deadline() const {
    return deadline_;
  }
  std::chrono::milliseconds timeout() const {
    return timeout_;
  }
  const std::shared_ptr<Group>& group() const {
    return group_;
  }
  const Signature& signature() const {
    return signature_;
  }
  // Group ranks that the operation cannot end without. Without `announced`, those that still owe it a message: data that is
  // on its way after its header, or on its way out of here, comes through even when the peer has gone in good order.
  std::set<int> awaited(bool announced = true) const;
  // Whether any message of this operation came from `peer`.
  bool heard_from(int peer) const;
  // Whether a message is of this operation, not of a later one with its name.
  bool owns(int source, const Header& header) const;
  // Whether a message from `peer` is still to come; as message `step`.
  bool expects(int peer) const;
  bool expects(int peer, uint16_t step) const;
  // "allreduce #12 (allreduce(SUM, float32[3])) of group 0"
  std::string describe() const;
  // "; not there: rank 1; waiting for rank 2", which has come but cannot go on without rank 1, say. By what has come, or by an inquiry.
  std::string describe_awaited() const;

  // --- of send and recv, which are matched by tag and source, oldest first, as in MPI ---
  // The user's tag, which is the operation's key.
  virtual uint64_t tag() const {
    return 0;
  }
  // Whether it takes a message.
  virtual bool receives() const {
    return false;
  }
  // Whether it takes this one.
  virtual bool matches(int source, const Header& header) const {
    return false;
  }

 protected:
  virtual void launch() = 0;
  virtual Action advance() = 0;
  virtual void compute() {}

  // --- for algorithms ---
  int rank() const;
  int size() const;
  // The ranks by host; the same on every rank.
  const Machines& hosts() const;
  struct Destination {
    int peer;
    double scale = 1.0;
  };
  using Memory = Transport::Memory;
  enum class Order {
    kAtOnce,
    // Where message `step` of such a rank is still to come, which it sends whatever this rank does, large data waits for that one's header.
    // Else data that has begun one way would hold up what MPI has to say, on the same connection, for data to begin the other way.
    kAfterTheirs,
  };
  // Sends the same `bytes` of `data` to several group ranks as message `step`.
  void send(
      c10::ArrayRef<Destination> destinations,
      uint16_t step,
      const void* data,
      size_t bytes,
      bool confirm = false,
      Memory memory = Memory::kStays,
      Order order = Order::kAtOnce);
  void send_after_theirs(c10::ArrayRef<Destination> destinations, uint16_t step, const void* data, size_t bytes) {
    send(destinations, step, data, bytes, false, Memory::kStays, Order::kAfterTheirs);
  }
  void send(int peer, uint16_t step, const void* data, size_t bytes, double scale = 1.0, bool confirm = false) {
    send(Destination{peer, scale}, step, data, bytes, confirm);
  }
  // Something that the transport does with all others of the group: without it the operation does not end.
  void follow(std::shared_ptr<Outgoing> exchange);
  // How much of `bytes` that are to be overwritten has been sent.
  size_t sent(size_t bytes) const;
  // All other ranks, beginning with the next one, so that not everybody sends to rank 0 first.
  std::vector<Destination> others() const;
  // Expects exactly `bytes` from `peer` as message `step`, into `data`. That may be memory which this operation sends, and which those it goes to
  // have in whole when `peer` sends this message. But MPI may not have said so, and must not be asked to write to what it still reads: the
  // message waits for that.
  size_t receive(int peer, uint16_t step, void* data, size_t bytes);
  // Expects exactly `bytes` from `peer`, which are read where they lie: compute() finds them as input().
  size_t receive_input(int peer, uint16_t step, size_t bytes);
  const Input& input(size_t receive) const {
    return receives_[receive].input;
  }
  // For advance(): kCompute when there is more of all inputs, of `bytes` each, than compute() has used; it then is to use
  // bytes used() to usable(), at most `limit`. kDone when it has used all, else kWait.
  Action use_inputs(size_t bytes, size_t limit);
  Action use_inputs(size_t bytes) {
    return use_inputs(bytes, bytes);
  }
  // The inputs are those that come as message `step` from now on, of which so many bytes have been used. They were those of step 0.
  void select_input_step(uint16_t step, size_t used = 0) {
    input_step_ = step;
    used_ = usable_ = used;
  }
  size_t used() const {
    return used_;
  }
  size_t usable() const {
    return usable_;
  }
  // Expects a message of any size; fetch() then names the place for its data.
  size_t receive_header(int peer, uint16_t step);
  void fetch(size_t receive, void* data);
  // True once every receive with this step number is complete.
  bool received(uint16_t step) const;
  bool received_all() const;
  const Header& header(size_t receive) const {
    return receives_[receive].header;
  }
  // The rank that a receive has matched.
  int source(size_t receive) const {
    return receives_[receive].peer;
  }
  // Between a rank that only sends in an operation and one that only receives from it: the receiver sends an empty message
  // at once, so that each has seen what the other one called. Nothing happens where confirm is off.
  void announce_to(int peer);
  void expect_announcement(int peer);
  bool announced() const {
    return received(kAnnouncement);
  }
  void set_outputs(std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
    has_outputs_ = true;
  }
  // Memory that lives as long as the operation; other ranks of this host can read it where it is.
  void* scratch(size_t bytes);
  // Takes a point-to-point message that the group has matched to this receive.
  virtual void on_unmatched(int source, const Header& header);

  Signature signature_;
  c10::intrusive_ptr<WorkFog> work_;

 private:
  enum class State { kNew, kActive, kEnded };
  struct Receive {
    int peer = -1;
    uint16_t step = 0;
    void* data = nullptr;
    size_t bytes = 0;
    bool any_size = true;
    bool arrived = false;
    bool complete = false;
    Header header;
    std::vector<char> stash; // inline data that is read here, or whose place is not known yet
    bool waits = false; // until what it overwrites has been sent
    bool in_place = false; // to be read where it is
    std::shared_ptr<Incoming> incoming; // null: it has come with its header
    Input input; // what of it compute() may read
    size_t taken = 0; // bytes
  };
  struct Going {
    std::shared_ptr<Outgoing> data;
    std::vector<int> peers;
    const char* memory;
    size_t bytes;
  };
  // What run() copies: into a chunk, or to its place.
  struct Move {
    std::shared_ptr<Outgoing> outgoing; // null: coming in
    Outgoing::Fill fill;
    size_t receive = 0;
    std::vector<Block> blocks;
  };
  enum class Task { kNone, kMove, kCompute };
  static constexpr uint16_t kAnnouncement = 63; // a step that no algorithm uses
  // How much of an input is used, or of a message copied to its place, before its sender hears of it.
  static size_t step_bytes(size_t bytes);

  void confirm_to(int peer);
  void note_arrival(int source, size_t bytes);
  void complete_receive(Receive& receive);
  void take(size_t index, const char* data);
  Header header_for(uint16_t step, size_t bytes) const;
  bool plan_moves();
  void finish_moves();
  bool is_sending(const void* memory, size_t bytes) const;
  void check_transfers() const;
  void release_inputs();
  void tell_taken(Receive& receive, size_t taken);

  State state_ = State::kNew;
  std::shared_ptr<Group> group_;
  uint64_t key_ = 0;
  uint64_t sequence_ = 0;
  NameTable::Use use_; // of its name, if it has one
  std::chrono::steady_clock::time_point deadline_;
  std::chrono::milliseconds timeout_{0};
  bool confirm_ = true;
  bool has_outputs_ = false;
  c10::SmallVector<Receive, 1> receives_;
  std::vector<Going> going_; // what peers, or the transport, still read
  std::vector<size_t> to_move_; // receives whose data is to be copied to its place
  std::vector<Move> moves_; // of run()
  int waiting_ = 0; // receives that wait until what they go over has been sent
  bool data_waits_ = false; // for headers of those that it goes to
  bool moved_ = false; // something has changed in a transfer
  Task task_ = Task::kNone;
  uint16_t input_step_ = 0;
  size_t used_ = 0;
  size_t usable_ = 0;
  c10::SmallVector<size_t, 4> receiving_; // by step: receives not complete
  std::multiset<int> unconfirmed_;
  c10::SmallVector<at::Tensor, 4> kept_;
  std::vector<at::Tensor> outputs_;
  std::vector<c10::DataPtr> scratch_;
  std::function<void()> epilogue_;
};

} // namespace fog

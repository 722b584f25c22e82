// One operation in flight: a small state machine that is driven by messages.
//
// An algorithm derives from Operation. launch() posts its first sends and receives. advance() is called after each
// event and returns whether to wait, to compute (outside of the engine's lock), or that the operation is done. The
// algorithm names peers by group rank and does not access the engine.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
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

  // --- for the creator of the operation ---
  // Keeps a tensor whose memory the operation uses until the operation ends.
  void keep(const at::Tensor& tensor) {
    kept_.push_back(tensor);
  }
  // Runs after success, before the Work completes, outside of the engine's lock. It copies staged results to their
  // places.
  void set_epilogue(std::function<void()> epilogue) {
    epilogue_ = std::move(epilogue);
  }
  void set_work(c10::intrusive_ptr<WorkFog> work) {
    work_ = std::move(work);
  }
  // Sets whether senders wait until the receiver has accepted their messages, if they would not learn of it otherwise.
  void set_confirm(bool confirm) {
    confirm_ = confirm;
  }

  // Sets whether its caller has chosen a timeout that is longer than the group's: then it is no hang if a peer's program
  // does not come.
  void set_patient(bool patient) {
    patient_ = patient;
  }
  bool patient() const {
    return patient_;
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
  // Calls advance(). Returns kWait instead of kDone while memory is in use or a confirmation is missing, and kCompute
  // also if data has to be copied from other processes.
  Action step();
  // run() does the work that step() requested with kCompute, without the lock. settle() follows with the lock, also if
  // the operation has ended meanwhile.
  void run();
  void settle();
  // Returns whether run() computes; otherwise it copies.
  bool computes() const {
    return task_ == Task::kCompute;
  }
  // Copies results to their places and completes the Work.
  void finish(std::exception_ptr error);
  // Ends the operation without completing its Work; later events are ignored.
  void retire() {
    state_ = State::kEnded;
  }

  bool ended() const {
    return state_ == State::kEnded;
  }
  bool computing = false; // a thread is in run()
  bool failing = false; // it takes no further steps
  std::exception_ptr late_error; // set if it ended while a thread was in run(): finish() follows after that
  bool queued = false; // in the ready queue
  std::unique_ptr<Inquiry> inquiry; // set once its timeout is over
  bool asked_early = false; // the awaited ranks were asked before the timeout
  std::unique_ptr<OperationTimes> times; // while there is an observer
  uint64_t flight = 0; // its number in the flight record
  Deadline next_note = {}; // when its wait is recorded there again
  bool warned = false; // about its long wait
  Deadline watched = {}; // when the transport last watched the awaited ranks
  uint64_t key() const {
    return key_;
  }
  // The use of its name, if it has one.
  NameTable::Use use() const {
    return use_;
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
  // The group ranks that the operation needs to end. With `announced` false, only the ranks that still owe it a
  // message: data that follows its header, or is being sent from here, also arrives if the peer has left regularly.
  std::set<int> awaited(bool announced = true) const;
  // Returns whether any message of this operation has come from `peer`.
  bool heard_from(int peer) const;
  // Returns whether a message belongs to this operation, and not to a later one with the same name.
  bool owns(int source, const Header& header) const;
  // Returns whether any message from `peer` is still to come.
  bool expects(int peer) const;
  // "allreduce #12 [allreduce(SUM, float32[3])] of group '0' on rank 1"
  std::string describe() const;
  // "; not there: rank 1; waiting for rank 2", for example if rank 2 has come but cannot continue without rank 1. Uses
  // the received messages, or the inquiry if there was one.
  std::string describe_awaited() const;

  // --- for send and recv, which are matched by tag and source, oldest first, as in MPI ---
  // The user's tag, which is the operation's key.
  virtual uint64_t tag() const {
    return 0;
  }
  // Returns whether the operation is a receive.
  virtual bool receives() const {
    return false;
  }
  // Returns whether the receive matches this message.
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
    bool only_sender = false; // see Transport::Destination
  };
  static std::vector<Destination> destinations_at(const std::vector<int>& ranks);
  using Memory = Transport::Memory;
  // Sends the same `bytes` of `data` to several group ranks as message `step`.
  void send(
      c10::ArrayRef<Destination> destinations,
      uint16_t step,
      const void* data,
      size_t bytes,
      bool confirm = false,
      Memory memory = Memory::kStays);
  void send(int peer, uint16_t step, const void* data, size_t bytes, double scale = 1.0, bool confirm = false) {
    send(Destination{peer, scale}, step, data, bytes, confirm);
  }
  // The number of bytes, of the first `bytes`, that have been sent in all transfers and may be overwritten.
  size_t sent(size_t bytes) const;
  // Expects exactly `bytes` from `peer` as message `step`, into `data`. The operation may also be sending this memory,
  // if its receivers have all of it when `peer` sends the message. But the sends may not be known as complete,
  // and must not write to memory that it still reads: the message then waits.
  size_t receive(int peer, uint16_t step, void* data, size_t bytes);
  // Expects exactly `bytes` from `peer`, which are read in place: compute() accesses them with input().
  size_t receive_input(int peer, uint16_t step, size_t bytes);
  const Input& input(size_t receive) const {
    return receives_[receive].input;
  }
  // For advance(). Returns kCompute if all inputs, of `bytes` each, have data that compute() has not used; compute()
  // then has to use the bytes from used() to usable(), at most `limit`. Returns kDone once everything is used,
  // otherwise kWait.
  Action use_inputs(size_t bytes, size_t limit);
  Action use_inputs(size_t bytes) {
    return use_inputs(bytes, bytes);
  }
  // Makes the messages `step` the inputs from now on, of which `used` bytes have been used. Initially the inputs are
  // the messages 0.
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
  // Expects a message of any size; fetch() then sets the place for its data.
  size_t receive_header(int peer, uint16_t step);
  void fetch(size_t receive, void* data);
  // Returns whether every receive with this step number is complete.
  bool received(uint16_t step) const;
  bool received_all() const;
  const Header& header(size_t receive) const {
    return receives_[receive].header;
  }
  // The rank that a receive has matched.
  int source(size_t receive) const {
    return receives_[receive].peer;
  }
  // The value of set_confirm().
  bool confirms() const {
    return confirm_;
  }
  // Announcements between a rank that only sends in an operation and a rank that only receives from it: the receiver
  // sends an empty message at once, so that each rank checks the other's signature. They do nothing if confirmations
  // are off.
  void announce_to(int peer);
  void expect_announcement(int peer);
  bool announced() const {
    return received(kAnnouncement);
  }
  void set_outputs(std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
    has_outputs_ = true;
  }
  // Allocates memory that lives as long as the operation; other ranks of this host can read it in place.
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
    std::vector<char> stash; // inline data that is read here, or whose destination is not known yet
    bool waits = false; // until the memory that it overwrites has been sent
    bool in_place = false; // read where the sender has put it
    std::shared_ptr<Incoming> incoming; // null if the data came with its header
    Input input; // the part that compute() may read
    size_t taken = 0; // bytes
  };
  struct Going {
    std::shared_ptr<Outgoing> data;
    std::vector<int> peers;
    const char* memory;
    size_t bytes;
  };
  // A copy for run(): from the memory to send into a chunk, or from a peer to its destination.
  struct Move {
    std::shared_ptr<Outgoing> outgoing; // null for incoming data
    Outgoing::Fill fill;
    size_t receive = 0;
    std::vector<Block> blocks;
  };
  enum class Task { kNone, kMove, kCompute };
  static constexpr uint16_t kAnnouncement = 63; // a step that no algorithm uses
  // How many bytes of an input are used, or of a message copied, before the sender is told.
  static size_t step_bytes(size_t bytes);

  // The first receive that a message fits and that has no message yet.
  std::optional<size_t> find_receive(int source, uint16_t step);
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
  bool patient_ = false;
  bool has_outputs_ = false;
  c10::SmallVector<Receive, 1> receives_;
  std::multimap<std::pair<int, uint16_t>, size_t> index_; // of receives_ by peer and step, if there are many
  std::vector<Going> going_; // transfers that peers, or the transport, may still read
  std::vector<size_t> to_move_; // receives whose data has to be copied to its destination
  std::vector<Move> moves_; // for run()
  int waiting_ = 0; // receives that wait until the memory that they overwrite has been sent
  bool moved_ = false; // a transfer has made progress
  Task task_ = Task::kNone;
  uint16_t input_step_ = 0;
  size_t used_ = 0;
  size_t usable_ = 0;
  c10::SmallVector<size_t, 4> receiving_; // by step: number of incomplete receives
  std::multiset<int> unconfirmed_;
  c10::SmallVector<at::Tensor, 4> kept_;
  std::vector<at::Tensor> outputs_;
  std::vector<c10::DataPtr> scratch_;
  std::function<void()> epilogue_;
};

} // namespace fog

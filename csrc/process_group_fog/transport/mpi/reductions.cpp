#include "transport/mpi/reductions.hpp"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "core/failure.hpp"

namespace fog::mpi {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

// MPI counts elements in int, and may allocate as much memory as a piece has.
constexpr size_t kPieceBytes = size_t(256) << 20;

// Returns nothing if some MPI versions lack the type (float16 and bfloat16), and for bool, whose sums are logical.
std::optional<MPI_Datatype> type_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
      return MPI_UINT8_T;
    case c10::ScalarType::Char:
      return MPI_INT8_T;
    case c10::ScalarType::Short:
      return MPI_INT16_T;
    case c10::ScalarType::Int:
      return MPI_INT32_T;
    case c10::ScalarType::Long:
      return MPI_INT64_T;
    case c10::ScalarType::UInt16:
      return MPI_UINT16_T;
    case c10::ScalarType::UInt32:
      return MPI_UINT32_T;
    case c10::ScalarType::UInt64:
      return MPI_UINT64_T;
    case c10::ScalarType::Float:
      return MPI_FLOAT;
    case c10::ScalarType::Double:
      return MPI_DOUBLE;
    case c10::ScalarType::ComplexFloat:
      return MPI_C_FLOAT_COMPLEX;
    case c10::ScalarType::ComplexDouble:
      return MPI_C_DOUBLE_COMPLEX;
    default:
      return std::nullopt;
  }
}

std::optional<MPI_Op> op_of(RedOp op) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::AVG:
      return MPI_SUM;
    case RedOp::PRODUCT:
      return MPI_PROD;
    case RedOp::MIN:
      return MPI_MIN;
    case RedOp::MAX:
      return MPI_MAX;
    case RedOp::BAND:
      return MPI_BAND;
    case RedOp::BOR:
      return MPI_BOR;
    case RedOp::BXOR:
      return MPI_BXOR;
    default:
      return std::nullopt;
  }
}

const char* name_of_call(OpKind kind) {
  return kind == OpKind::kAllreduce ? "MPI_Iallreduce" : kind == OpKind::kReduce ? "MPI_Ireduce" : "MPI_Ireduce_scatter_block";
}

} // namespace

class Reductions::OfGroup final : public NetworkSums, public std::enable_shared_from_this<OfGroup> {
 public:
  OfGroup(Reductions& all, std::vector<Member> members, MPI_Comm communicator)
      : members(std::move(members)), communicator(communicator), all_(all) {}

  bool has(OpKind kind, RedOp op, c10::ScalarType dtype, size_t numel) const override {
    // A reduce-scatter cannot be split into pieces.
    const bool fits = kind != OpKind::kReduceScatter || numel <= static_cast<size_t>(std::numeric_limits<int>::max());
    return fits && numel > 0 && type_of(dtype) && op_of(op);
  }
  std::shared_ptr<Sum> add(const Terms& terms, const std::shared_ptr<TransferOwner>& owner) override;
  void close(bool failed) override;
  // Begins all sums that are allowed to begin.
  void go_on();

  const std::vector<Member> members;
  const MPI_Comm communicator;
  size_t seen_ends = std::numeric_limits<size_t>::max(); // number of ended processes when the members were last checked

 private:
  Reductions& all_;
  std::deque<std::shared_ptr<Pending>> waiting_; // sums that have not begun
  bool closed_ = false;
};

class Reductions::Pending final : public NetworkSums::Sum, public std::enable_shared_from_this<Pending> {
 public:
  Pending(Reductions& all, std::shared_ptr<OfGroup> group, const NetworkSums::Terms& terms, const std::shared_ptr<TransferOwner>& owner)
      : group(std::move(group)), terms(terms), all_(all), listener_(owner) {}

  bool done() const override {
    return done_;
  }
  bool done(PeerId peer) const override {
    return done_;
  }
  size_t sent() const override {
    return 0;
  }
  void agreed() override {
    agreed_ = true;
    group->go_on();
  }
  bool has_agreed() const {
    return agreed_;
  }

  // MPI gets another piece, and its memory must stay valid until the piece is done.
  void on_piece_begun() {
    owner_ = owner_ ? owner_ : listener_.lock();
    ++pieces_;
  }
  void on_piece(const std::string& what) {
    --pieces_;
    fail(what);
    settle();
  }
  // MPI gets no more pieces.
  void on_all_begun() {
    all_begun_ = true;
    settle();
  }
  void fail(const std::string& what) {
    error = error.empty() ? what : error;
  }

  const std::shared_ptr<OfGroup> group;
  const NetworkSums::Terms terms;

 private:
  void settle() {
    if (!all_begun_ || pieces_ > 0 || done_) {
      return;
    }
    done_ = error.empty();
    all_.end(*this);
    if (const auto owner = listener_.lock()) {
      owner->on_progress();
    }
    if (owner_) {
      all_.messages_.released().push_back(std::move(owner_)); // to be released without the lock
    }
  }

  Reductions& all_;
  const std::weak_ptr<TransferOwner> listener_; // a weak pointer, because the owner holds this
  std::shared_ptr<TransferOwner> owner_; // set while MPI accesses its memory
  bool agreed_ = false;
  size_t pieces_ = 0; // pieces that MPI has
  bool all_begun_ = false;
  bool done_ = false;
};

std::shared_ptr<NetworkSums::Sum> Reductions::OfGroup::add(const Terms& terms, const std::shared_ptr<TransferOwner>& owner) {
  waiting_.push_back(std::make_shared<Pending>(all_, shared_from_this(), terms, owner));
  return waiting_.back();
}

void Reductions::OfGroup::go_on() {
  while (!waiting_.empty() && waiting_.front()->has_agreed()) {
    const auto next = std::move(waiting_.front());
    waiting_.pop_front();
    all_.begin(*next);
  }
}

void Reductions::OfGroup::close(bool failed) {
  waiting_.clear(); // they hold this object
  const auto is_lost = [this](const Member& member) { return all_.losses_.is_lost(member.peer); };
  if (std::exchange(closed_, true) || failed || all_.in_flight_.count(this) > 0 ||
      std::any_of(members.begin(), members.end(), is_lost)) {
    return;
  }
  auto freed = communicator;
  try {
    all_.watchdog_.call("MPI_Comm_free", -1, [&] { return api().Comm_free(&freed); });
  } catch (const c10::DistBackendError&) { // the next user of MPI gets the error
  }
}

Reductions::Reductions(Runtime& runtime, Messages& messages, Watchdog& watchdog, Losses& losses)
    : runtime_(runtime), messages_(messages), watchdog_(watchdog), losses_(losses) {}

std::shared_ptr<NetworkSums> Reductions::among(std::vector<Member> members, uint64_t id, Deadline deadline) {
  std::vector<int> ranks;
  for (const auto& member : members) {
    ranks.push_back(member.peer); // as in Messages
  }
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm communicator = MPI_COMM_NULL;
  check(api().Comm_group(runtime_.communicator(), &world), "MPI_Comm_group");
  check(api().Group_incl(world, static_cast<int>(ranks.size()), ranks.data(), &group), "MPI_Group_incl");
  const auto tag = static_cast<int>(id % static_cast<uint64_t>(runtime_.max_tag()));
  watchdog_.expect(deadline);
  const auto create = [&] { return api().Comm_create_group(runtime_.communicator(), group, tag, &communicator); };
  check(watchdog_.call("MPI_Comm_create_group", -1, create), "MPI_Comm_create_group");
  check(api().Comm_set_errhandler(communicator, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  api().Group_free(&group);
  api().Group_free(&world);
  return std::make_shared<OfGroup>(*this, std::move(members), communicator);
}

void Reductions::begin(Pending& sum) {
  const auto& terms = sum.terms;
  const auto* name = name_of_call(terms.kind);
  const size_t item = c10::elementSize(terms.dtype);
  const auto type = *type_of(terms.dtype);
  const auto op = *op_of(terms.op);
  const auto communicator = sum.group->communicator;
  const size_t most = terms.kind == OpKind::kReduceScatter ? terms.numel : kPieceBytes / item;
  for (const auto& member : sum.group->members) {
    messages_.speak_with(member.peer); // MPI may send to it, so this process must say goodbye to it at its end
  }
  ++in_flight_[sum.group.get()];
  watchdog_.set_guard([this] { look_for_lost(); });
  try {
    for (size_t first = 0; first < terms.numel; first += most) {
      const auto count = static_cast<int>(std::min(most, terms.numel - first));
      const void* in = terms.in == terms.out ? MPI_IN_PLACE : static_cast<const char*>(terms.in) + first * item;
      void* out = terms.out == nullptr ? nullptr : static_cast<char*>(terms.out) + first * item;
      MPI_Request request = MPI_REQUEST_NULL;
      messages_.make_room();
      const int code = watchdog_.call(name, -1, [&] {
        switch (terms.kind) {
          case OpKind::kAllreduce:
            return api().Iallreduce(in, out, count, type, op, communicator, &request);
          case OpKind::kReduce:
            return api().Ireduce(in, out, count, type, op, terms.root, communicator, &request);
          default:
            return api().Ireduce_scatter_block(in, out, count, type, op, communicator, &request);
        }
      });
      check(code, name);
      sum.on_piece_begun();
      messages_.follow(
          request, static_cast<size_t>(count) * item > Transport::kInlineBytes,
          [sum = sum.shared_from_this()](const std::string& error) { sum->on_piece(error); });
    }
  } catch (const std::exception& failure) {
    sum.fail(message_of(failure));
  }
  sum.on_all_begun();
}

void Reductions::end(const Pending& sum) {
  const auto found = in_flight_.find(sum.group.get());
  if (--found->second == 0) {
    in_flight_.erase(found);
  }
  if (in_flight_.empty()) {
    watchdog_.set_guard(nullptr);
  }
}

void Reductions::look_for_lost() {
  if (watchdog_.broken()) {
    return;
  }
  const size_t ends = losses_.ends();
  for (const auto& [group, count] : in_flight_) {
    if (std::exchange(group->seen_ends, ends) == ends) {
      continue;
    }
    for (const auto& [peer, name] : group->members) {
      if (losses_.is_lost(peer)) {
        watchdog_.break_off(
            c10::str(
                name, ' ', kLost,
                " while MPI's own reduction with it was in flight (reduce=\"mpi\"); MPI cannot be used any more in this process"));
        return;
      }
    }
  }
}

} // namespace fog::mpi

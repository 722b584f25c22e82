#include "device/neighbors.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include "core/neighbor_plan.hpp"
#include "core/tensor_lists.hpp"
#include "device/combine.hpp"

namespace fog::device {

using c10d::OpType;
using WorkPtr = Neighbors::WorkPtr;
using Tensors = Neighbors::Tensors;

namespace {

// All messages between two ranks have this tag; they are matched by their order.
constexpr int kTag = 0;

// The most bytes of a vector that a round of an exchange sums. A longer one, such as a whole model in one list, goes in
// rounds that reuse the memory of what is received; else the allocator would keep as many vectors as there are sources.
constexpr int64_t kRoundBytes = int64_t{32} << 20;

// Contiguous memory for the tensors of one dtype in a list: their own memory if they are contiguous already.
class Flat {
 public:
  // Copies the tensors' values if `read` is set.
  Flat(const Tensors& tensors, bool read) : tensors_(tensors) {
    if (const auto own = adjacent(tensors)) {
      vector_ = *own;
      return;
    }
    is_copy_ = true;
    vector_ = at::empty({total_numel(tensors)}, tensors[0].options().requires_grad(false));
    if (read) {
      const auto views = views_of(vector_, tensors);
      for (size_t i = 0; i < tensors.size(); ++i) {
        views[i].copy_(tensors[i]);
      }
    }
  }

  const at::Tensor& vector() const {
    return vector_;
  }
  // Copies the vector's values to the tensors.
  void deliver() const {
    if (is_copy_) {
      unflatten(vector_, tensors_);
    }
  }

 private:
  const Tensors tensors_;
  at::Tensor vector_;
  bool is_copy_ = false;
};

} // namespace

Neighbors::Neighbors(BackendPtr delegate, std::shared_ptr<DelegateGate> gate, int rank, std::string group, const at::Device& device)
    : delegate_(std::move(delegate)), gate_(std::move(gate)), rank_(rank), group_(std::move(group)), device_(device), stream_(device) {
  TORCH_CHECK(
      !is_capturing(device), "fog: the first of fog's operations of group '", group_, "' on ", device,
      " cannot be captured into a graph: run it once before");
}

WorkPtr Neighbors::run(const Call& call, const Tensors& inputs, const Tensors& outputs, const std::function<void(Works& works)>& body) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t sequence = ++sequence_;
  const auto what = c10::str(call.op, " #", sequence, " of group '", group_, "' on ", device_);
  // The profiler counts the following device work as this operation's.
  std::vector<c10::IValue> seen;
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) {
    seen.assign(inputs.begin(), inputs.end());
    range.before(call.title, c10::ArrayRef<const c10::IValue>(seen.data(), seen.size()));
  }
  const auto launched_on = current_stream(device_);
  at::AutoDispatchBelowADInplaceOrView no_grad;
  const Stream::Guard guard(stream_);
  Works works;
  const auto finish = [&] {
    return c10::make_intrusive<Work>(
        Work::Description{rank_, call.type, what, sequence}, inputs, outputs, std::move(works), stream_, launched_on);
  };
  try {
    naming(what, [&] { body(works); });
  } catch (...) {
    finish(); // its Work keeps the tensors' memory while the stream uses it
    throw;
  }
  return finish();
}

// Sends and receives bytes: the delegate may not support the messages' dtype.
void Neighbors::exchange(const Messages& sends, const Messages& receives, Works& works) {
  const auto start = [&](const Messages& messages, auto&& give) {
    for (const auto& [peer, tensor] : messages) {
      if (tensor.numel() > 0) {
        Tensors bytes = {tensor.view({-1}).view(at::kByte)};
        works.push_back(give(bytes, peer));
      }
    }
  };
  const auto give_all = [&](const Messages& out, const Messages& in) {
    start(out, [&](Tensors& bytes, int peer) { return delegate_->send(bytes, peer, kTag); });
    start(in, [&](Tensors& bytes, int peer) { return delegate_->recv(bytes, peer, kTag); });
  };
  const size_t before = works.size();
  if (!delegate_->supportsCoalescing()) {
    give_all(sends, receives);
  } else {
    Messages out = sends;
    Messages in = receives;
    const auto is_empty = [](const Messages& messages) {
      return std::all_of(messages.begin(), messages.end(), [](const Message& message) { return message.tensor.numel() == 0; });
    };
    if (is_empty(out) && is_empty(in)) {
      if (connected_) {
        return;
      }
      // NCCL connects all ranks of a group in the first operation of each rank. A rank without a peer takes part with a
      // message to itself.
      const auto options = at::TensorOptions(device_).dtype(at::kByte);
      out = {{rank_, at::zeros({1}, options)}};
      in = {{rank_, at::empty({1}, options)}};
    }
    std::unique_lock<DelegateGate> alone(*gate_);
    delegate_->startCoalescing();
    try {
      give_all(out, in);
    } catch (...) {
      try { // otherwise the delegate would add later operations to this group
        delegate_->endCoalescing();
      } catch (const std::exception&) { // report the first failure
      }
      works.resize(before);
      throw;
    }
    works.resize(before); // the Works of the single operations carry no information
    works.push_back(delegate_->endCoalescing());
    alone.unlock();
    connected_ = true;
  }
  works.erase(std::remove(works.begin() + static_cast<std::ptrdiff_t>(before), works.end(), WorkPtr()), works.end());
  for (size_t i = before; i < works.size(); ++i) {
    works[i]->wait(); // makes the current stream wait
  }
}

void Neighbors::mix(const std::vector<Mix>& mixes, const NeighborPlan& plan, const RankOf& rank_of, Works& works) {
  bool is_last = false;
  for (int64_t round = 0; !is_last; ++round) {
    is_last = true;
    std::vector<Mix> parts;
    for (const auto& [own, out] : mixes) {
      const auto longest = kRoundBytes / static_cast<int64_t>(own.element_size());
      const auto begin = std::min(round * longest, own.numel());
      const auto length = std::min(longest, own.numel() - begin);
      parts.push_back({own.narrow(0, begin, length), out.narrow(0, begin, length)});
      is_last = is_last && begin + length == own.numel();
    }
    mix_round(parts, plan, rank_of, works);
  }
}

void Neighbors::mix_round(const std::vector<Mix>& mixes, const NeighborPlan& plan, const RankOf& rank_of, Works& works) {
  // A weight of 0 means no edge, so not even a NaN may have an effect: the tensors with weight 0 get the last rows, and
  // only the rows before them are summed.
  auto sources = plan.sources();
  const auto unheard =
      std::stable_partition(sources.begin(), sources.end(), [](const WeightedPeer& source) { return source.weight != 0.0; });
  std::vector<double> weights;
  std::transform(sources.begin(), unheard, std::back_inserter(weights), [](const WeightedPeer& source) { return source.weight; });
  Messages sends;
  Messages receives;
  Tensors received;
  for (const auto& [own, out] : mixes) {
    std::vector<std::pair<double, at::Tensor>> shares = {{1.0, own}};
    for (const auto& peer : plan.destinations()) {
      auto found = std::find_if(shares.begin(), shares.end(), [&](const auto& made) { return made.first == peer.weight; });
      if (found == shares.end()) {
        found = shares.insert(shares.end(), {peer.weight, scaled(own, peer.weight)});
      }
      sends.push_back({rank_of(peer.rank), found->second});
    }
    const auto& rows = received.emplace_back(at::empty({static_cast<int64_t>(sources.size()), own.numel()}, own.options()));
    for (size_t i = 0; i < sources.size(); ++i) {
      receives.push_back({rank_of(sources[i].rank), rows[static_cast<int64_t>(i)]});
    }
  }
  exchange(sends, receives, works);
  for (size_t i = 0; i < mixes.size(); ++i) {
    const auto heard = received[i].narrow(0, 0, static_cast<int64_t>(weights.size()));
    combine(mixes[i].out, mixes[i].own, plan.self_weight(), heard, weights, plan.mean());
  }
}

WorkPtr Neighbors::neighbor_allreduce(const Tensors& tensors, const Parts& parts, const NeighborPlan& plan, const Tensors& outputs) {
  const Call call = {"neighbor_allreduce", "fog:neighbor_allreduce", OpType::UNKNOWN};
  return run(call, tensors, outputs, [&](Works& works) {
    std::vector<Flat> results;
    std::vector<Mix> mixes;
    for (const auto& places : parts) {
      const Flat own(pick(tensors, places), true);
      mixes.push_back({own.vector(), results.emplace_back(pick(outputs, places), false).vector()});
    }
    mix(mixes, plan, [](int rank) { return rank; }, works);
    for (const auto& result : results) {
      result.deliver();
    }
  });
}

WorkPtr Neighbors::hierarchical_neighbor_allreduce(
    const Tensors& tensors, const Parts& parts, const Machines& machines, const NeighborPlan& plan, const Tensors& outputs) {
  const Call call = {"hierarchical_neighbor_allreduce", "fog:hierarchical_neighbor_allreduce", OpType::UNKNOWN};
  const auto& local = machines.local();
  const auto count = static_cast<int64_t>(local.size());
  const auto place = static_cast<size_t>(machines.place());
  return run(call, tensors, outputs, [&](Works& works) {
    std::vector<Flat> results;
    Tensors owns; // this rank's slices of its own tensors, by part
    Tensors others; // the same slices of the machine's other ranks, as rows
    Messages sends;
    Messages receives;
    for (const auto& places : parts) {
      const Flat own(pick(tensors, places), true);
      results.emplace_back(pick(outputs, places), false);
      const auto slices = own.vector().tensor_split(count);
      owns.push_back(slices[place]);
      const auto& rows = others.emplace_back(at::empty({count - 1, slices[place].numel()}, own.vector().options()));
      for (size_t i = 0, row = 0; i < local.size(); ++i) {
        if (i != place) {
          sends.push_back({local[i], slices[i]});
          receives.push_back({local[i], rows[static_cast<int64_t>(row++)]});
        }
      }
    }
    if (local.size() > 1) {
      exchange(sends, receives, works);
    }
    sends.clear();
    receives.clear();
    std::vector<Mix> mixes;
    for (size_t part = 0; part < parts.size(); ++part) {
      auto mean = owns[part];
      if (local.size() > 1) {
        mean = at::empty_like(mean);
        combine(mean, owns[part], 1.0, others[part], std::vector<double>(local.size() - 1, 1.0), true);
      }
      const auto slices = results[part].vector().tensor_split(count);
      mixes.push_back({mean, slices[place]});
      for (size_t i = 0; i < local.size(); ++i) {
        if (i != place) {
          sends.push_back({local[i], slices[place]});
          receives.push_back({local[i], slices[i]});
        }
      }
    }
    mix(mixes, plan, [&](int machine) { return machines.rank(machine, machines.place()); }, works);
    if (local.size() > 1) {
      exchange(sends, receives, works);
    }
    for (const auto& result : results) {
      result.deliver();
    }
  });
}

WorkPtr Neighbors::local_allreduce(const at::Tensor& tensor, const Machines& machines, bool average) {
  const Call call = {"local_allreduce", "fog:local_allreduce", OpType::ALLREDUCE};
  const auto& local = machines.local();
  const auto place = static_cast<size_t>(machines.place());
  return run(call, {tensor}, {tensor}, [&](Works& works) {
    const Flat flat({tensor}, true);
    const auto slices = flat.vector().tensor_split(static_cast<int64_t>(local.size()));
    auto rows = at::empty({static_cast<int64_t>(local.size()), slices[place].numel()}, tensor.options().requires_grad(false)).unbind();
    rows[place] = slices[place];
    Messages sends;
    Messages receives;
    Messages results;
    Messages others;
    for (size_t i = 0; i < local.size(); ++i) {
      if (i != place) {
        sends.push_back({local[i], slices[i]});
        receives.push_back({local[i], rows[i]});
        results.push_back({local[i], slices[place]});
        others.push_back({local[i], slices[i]});
      }
    }
    exchange(sends, receives, works);
    const auto wide = c10::isReducedFloatingType(tensor.scalar_type()) ? at::kFloat : tensor.scalar_type();
    auto sum = rows[0].to(wide, false, true);
    for (size_t i = 1; i < rows.size(); ++i) {
      sum.add_(rows[i].to(wide));
    }
    if (average) { // divide by a tensor: a division by a number would multiply by its reciprocal
      sum.div_(at::full({}, static_cast<double>(rows.size()), sum.options()));
    }
    slices[place].copy_(sum);
    exchange(results, others, works);
    flat.deliver();
  });
}

WorkPtr Neighbors::gather(
    const char* op,
    const char* title,
    OpType type,
    const at::Tensor& tensor,
    const std::vector<int>& sources,
    const std::vector<int64_t>& rows,
    const std::vector<int>& destinations) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = 0;
  for (const auto count : rows) {
    sizes[0] += count;
  }
  // Allocate before the stream changes: the result belongs to the program's stream.
  const auto gathered = at::empty(sizes, tensor.options().requires_grad(false));
  return run({op, title, type}, {tensor}, {gathered}, [&](Works& works) {
    const auto own = tensor.contiguous();
    Messages sends;
    Messages receives;
    for (const int peer : destinations) {
      if (peer != rank_) {
        sends.push_back({peer, own});
      }
    }
    int64_t begin = 0;
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto part = gathered.narrow(0, begin, rows[i]);
      begin += rows[i];
      if (sources[i] == rank_) {
        part.copy_(own);
      } else {
        receives.push_back({sources[i], part});
      }
    }
    exchange(sends, receives, works);
  });
}

WorkPtr Neighbors::collective(const char* op, const char* title, OpType type, const at::Tensor& tensor, const Start& start) {
  return run({op, title, type}, {tensor}, {tensor}, [&](Works& works) {
    Tensors given = {tensor.contiguous()};
    const auto work = [&] {
      const std::shared_lock<DelegateGate> turn(*gate_);
      return start(*delegate_, given);
    }();
    if (work) {
      work->wait(); // makes the current stream wait
      works.push_back(work);
    }
    connected_ = true;
    if (!given[0].is_same(tensor)) {
      tensor.copy_(given[0]);
    }
  });
}

} // namespace fog::device

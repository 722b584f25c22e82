#include "collectives/hierarchical_neighbor_allreduce.hpp"

#include <utility>

#include <c10/util/Exception.h>

#include "core/arithmetic.hpp"
#include "engine/group.hpp"
#include "collectives/neighbor_sum.hpp"
#include "collectives/schedule.hpp"

namespace fog {

HierarchicalNeighborAllreduce::HierarchicalNeighborAllreduce(
    Signature signature, Machines machines, NeighborPlan plan, Encoding encoding, const void* in, void* out, size_t numel)
    : Operation(signature),
      machines_(std::move(machines)),
      plan_(std::move(plan)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      numel_(numel),
      dtype_(static_cast<c10::ScalarType>(signature.dtype)),
      item_(c10::elementSize(dtype_)),
      own_(slice(machines_.place())) {
  if (encoding.codec) {
    encodes_ = !plan_.destinations().empty() || encoding.decodes_own();
    sum_.emplace(std::move(encoding), dtype_, own_.numel / item_);
  }
}

// In bytes.
Slice HierarchicalNeighborAllreduce::slice(int place) const {
  const auto elements = slice_of(numel_, place, static_cast<int>(machines_.local().size()));
  return {elements.begin * item_, elements.numel * item_};
}

// The places of the other ranks of this machine, beginning with the next one.
std::vector<int> HierarchicalNeighborAllreduce::other_places() const {
  const int count = static_cast<int>(machines_.local().size());
  std::vector<int> places;
  for (int distance = 1; distance < count; ++distance) {
    places.push_back((machines_.place() + distance) % count);
  }
  return places;
}

// The bytes of each message between machines.
size_t HierarchicalNeighborAllreduce::mixed_bytes() const {
  return sum_ ? sum_->bytes() : own_.numel;
}

void HierarchicalNeighborAllreduce::launch() {
  const auto& local = machines_.local();
  inputs_.resize(local.size());
  for (const int place : other_places()) {
    const auto theirs = slice(place);
    inputs_[place] = receive_input(local[place], kAverage, own_.numel);
    // It comes after that rank has received all of its slice from here, so if `out` is `in`, no data is overwritten
    // that a peer still has to read.
    receive(local[place], kGather, out_ + theirs.begin, theirs.numel);
    send(local[place], kAverage, in_ + theirs.begin, theirs.numel);
  }
  for (const auto& source : plan_.sources()) {
    const int peer = machines_.rank(source.rank, machines_.place());
    if (sum_) {
      auto* message = static_cast<uint8_t*>(scratch(mixed_bytes()));
      messages_.push_back(message);
      means_.push_back(receive(peer, kMix, message, mixed_bytes()));
    } else {
      means_.push_back(receive_input(peer, kMix, mixed_bytes()));
    }
  }
  const bool sends = !plan_.destinations().empty();
  if (encodes_) {
    message_ = scratch(mixed_bytes());
  }
  if (local.size() == 1 && !(sends && in_ == out_) && !sum_) {
    mean_ = in_;
    start_mixing();
  } else { // peers read the mean while the result is computed, so it needs its own memory
    averaged_ = sends ? static_cast<char*>(scratch(own_.numel)) : out_ + own_.begin;
    mean_ = averaged_;
  }
}

void HierarchicalNeighborAllreduce::start_mixing() {
  phase_ = kMix;
  select_input_step(kMix);
  std::vector<Destination> destinations;
  for (const auto& destination : plan_.destinations()) {
    destinations.push_back({machines_.rank(destination.rank, machines_.place()), destination.weight});
  }
  send(destinations, kMix, sum_ ? message_ : mean_, mixed_bytes(), true);
}

// Each rank of a machine mixes its own slice: with different plans the slices would not fit together.
void HierarchicalNeighborAllreduce::check_plans() const {
  for (const int place : other_places()) {
    TORCH_CHECK_WITH(
        DistBackendError, header(inputs_[place]).operation.signature.plan == signature_.plan, "ranks disagree: this rank called ",
        name_of(signature_.kind), " with ", plan_.describe(), " for its machine, rank ", machines_.local()[place],
        " of the same machine with another plan");
  }
}

// As use_inputs(), for encoded means.
Operation::Action HierarchicalNeighborAllreduce::use_messages() {
  if (!received(kMix)) {
    return Action::kWait;
  }
  return std::exchange(summed_, true) ? Action::kDone : Action::kCompute;
}

Operation::Action HierarchicalNeighborAllreduce::advance() {
  if (phase_ == kAverage) {
    const auto action = use_inputs(own_.numel);
    if (action != Action::kDone) {
      return action;
    }
    check_plans();
    if (message_ != nullptr) {
      phase_ = kEncode;
      return Action::kCompute;
    }
    start_mixing();
  } else if (phase_ == kEncode) {
    start_mixing();
  }
  if (phase_ == kMix) {
    const auto action = sum_ ? use_messages() : use_inputs(mixed_bytes());
    if (action != Action::kDone) {
      return action;
    }
    phase_ = kGather;
    send(destinations_at(others_of(machines_.local(), machines_.place())), kGather, out_ + own_.begin, own_.numel);
  }
  return received(kGather) ? Action::kDone : Action::kWait;
}

void HierarchicalNeighborAllreduce::compute() {
  if (phase_ == kEncode) {
    sum_->encode(mean_, message_);
    return;
  }
  const size_t from = used() / item_;
  const size_t to = usable() / item_;
  if (phase_ == kMix) {
    std::vector<NeighborTerm> terms;
    std::vector<double> scales;
    for (const auto receive : means_) {
      terms.push_back({input(receive), header(receive).scale});
      scales.push_back(header(receive).scale);
    }
    if (sum_) {
      sum_->add(plan_, messages_, scales, mean_, message_, out_ + own_.begin);
    } else {
      neighbor_sum(plan_, dtype_, out_ + own_.begin, terms, mean_, from, to);
    }
    return;
  }
  std::vector<Input> inputs(machines_.local().size());
  for (const int place : other_places()) {
    inputs[place] = input(inputs_[place]);
  }
  inputs[machines_.place()].data = in_ + own_.begin;
  for_pieces(inputs, item_, from, to, [&](const std::vector<const void*>& where, size_t begin, size_t count) {
    weighted_sum(dtype_, averaged_ + begin * item_, where, {}, true, count);
  });
}

} // namespace fog

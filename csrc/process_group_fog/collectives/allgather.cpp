#include "collectives/allgather.hpp"

#include <algorithm>

#include "collectives/cutovers.hpp"
#include "collectives/schedule.hpp"
#include "core/copy.hpp"

namespace fog {
Allgather::Allgather(Signature signature, Part input, std::vector<Part> outputs)
    : Operation(signature), input_(input), outputs_(std::move(outputs)) {}

void Allgather::launch() {
  if (cutovers::sent_on(input_.bytes, size(), hosts())) {
    launch_steps();
  } else {
    launch_direct();
  }
}

// In step k, a rank receives from the rank 2^k places after it the blocks that it lacks.
void Allgather::launch_steps() {
  const auto ranks = static_cast<size_t>(size());
  blocks_ = static_cast<char*>(scratch(ranks * input_.bytes));
  copy_bytes(blocks_, input_.data, input_.bytes);
  for (int distance = 1; distance < size(); distance <<= 1) {
    const auto count = static_cast<size_t>(std::min(distance, size() - distance));
    receive(
        (rank() + distance) % size(), static_cast<uint16_t>(steps_++), blocks_ + static_cast<size_t>(distance) * input_.bytes,
        count * input_.bytes);
  }
  send_step();
}

void Allgather::send_step() {
  if (step_ < steps_) {
    const int distance = 1 << step_;
    const auto count = static_cast<size_t>(std::min(distance, size() - distance));
    send((rank() - distance + size()) % size(), static_cast<uint16_t>(step_), blocks_, count * input_.bytes);
  }
}

// Messages are numbered by the rank whose input they carry.
void Allgather::launch_direct() {
  const auto& local = hosts().local();
  const int count = static_cast<int>(local.size());
  const auto own = static_cast<uint16_t>(rank());
  std::vector<Destination> destinations;
  const int before = (hosts().machine() - 1 + hosts().count()) % hosts().count();
  for (int distance = 1; distance < hosts().count(); ++distance) {
    const int from = (hosts().machine() - distance + hosts().count()) % hosts().count();
    const auto& there = hosts().ranks(from);
    for (size_t place = 0; place < there.size(); ++place) {
      const int source = there[place];
      const int bringer = local[place % local.size()];
      const bool is_own = bringer == rank();
      const int sender = !is_own ? bringer : in_ring() ? carrier(before, source) : source;
      receive(sender, static_cast<uint16_t>(source), outputs_[source].data, outputs_[source].bytes);
      if (is_own) {
        to_pass_on_.push_back(source);
      }
    }
    if (!in_ring() || distance == 1) {
      destinations.push_back({carrier((hosts().machine() + distance) % hosts().count(), rank())});
    }
  }
  for (int distance = 1; distance < count; ++distance) {
    const int from = local[(hosts().place() - distance + count) % count];
    receive(from, static_cast<uint16_t>(from), outputs_[from].data, outputs_[from].bytes);
  }
  const auto beside = destinations_at(others_of(local, hosts().place()));
  destinations.insert(destinations.end(), beside.begin(), beside.end());
  send(destinations, own, input_.data, input_.bytes);
}

bool Allgather::in_ring() const {
  return cutovers::gathers_in_ring(input_.bytes);
}

int Allgather::carrier(int host, int source) const {
  const auto& ranks = hosts().ranks(host);
  return ranks[static_cast<size_t>(hosts().place_of(source)) % ranks.size()];
}

std::vector<Operation::Destination> Allgather::receivers_of(int source) const {
  auto receivers = destinations_at(others_of(hosts().local(), hosts().place()));
  const int next = (hosts().machine() + 1) % hosts().count();
  if (in_ring() && next != hosts().machine_of(source)) {
    receivers.insert(receivers.begin(), {carrier(next, source)});
  }
  return receivers;
}

Operation::Action Allgather::advance() {
  if (blocks_ != nullptr) {
    while (step_ < steps_ && received(static_cast<uint16_t>(step_))) {
      ++step_;
      send_step();
    }
    if (step_ < steps_) {
      return Action::kWait;
    }
  }
  if (!copied_) {
    copied_ = true;
    return Action::kCompute;
  }
  to_pass_on_.erase(
      std::remove_if(
          to_pass_on_.begin(), to_pass_on_.end(),
          [&](int source) {
            const bool is_here = received(static_cast<uint16_t>(source));
            if (is_here) {
              send(receivers_of(source), static_cast<uint16_t>(source), outputs_[source].data, outputs_[source].bytes);
            }
            return is_here;
          }),
      to_pass_on_.end());
  return received_all() ? Action::kDone : Action::kWait;
}

void Allgather::compute() {
  if (blocks_ == nullptr) {
    copy_own(input_, outputs_[rank()]);
    return;
  }
  for (int distance = 0; distance < size(); ++distance) {
    const auto& output = outputs_[(rank() + distance) % size()];
    if (output.data != input_.data) {
      copy_bytes(output.data, blocks_ + static_cast<size_t>(distance) * input_.bytes, output.bytes);
    }
  }
}

} // namespace fog

#include "collectives/reduction.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "core/arithmetic.hpp"

namespace fog {

using RedOp = c10d::ReduceOp::RedOpType;
using Kind = Schedule::Step::Kind;

Reduction::Reduction(const Terms& terms, std::vector<Schedule> schedules)
    : Operation(terms.signature),
      dtype_(terms.dtype),
      item_(c10::elementSize(terms.dtype)),
      scale_(terms.scale),
      count_(terms.layout.ranks.size()) {
  for (auto& schedule : schedules) {
    strands_.push_back({std::move(schedule.steps)});
  }
}

void Reduction::launch() {
  for (auto& strand : strands_) {
    for (const auto& step : strand.steps) {
      const size_t bytes = step.elements.numel * item_;
      if (step.kind == Kind::kAwait) {
        receive(step.ranks[0], step.message, place(step.elements.begin), bytes);
      } else if (step.kind == Kind::kCombine) {
        for (const int peer : step.ranks) {
          if (peer != rank()) {
            strand.coming.push_back(receive_input(peer, step.message, bytes));
          }
        }
      }
    }
  }
  announce();
  for (auto& strand : strands_) {
    for (; !strand.ended() && strand.steps[strand.next].kind == Kind::kSend; ++strand.next) {
      send_step(strand.steps[strand.next]);
    }
  }
}

// Announcements between ranks of which one only sends to the other.
void Reduction::announce() {
  std::set<int> to;
  std::set<int> from;
  for (const auto& step : strands_[0].steps) { // the same in all strands
    (step.kind == Kind::kSend ? to : from).insert(step.ranks.begin(), step.ranks.end());
  }
  for (const int peer : to) {
    if (from.count(peer) == 0) {
      expect_announcement(peer);
    }
  }
  from.erase(rank());
  for (const int peer : from) {
    if (to.count(peer) == 0) {
      announce_to(peer);
    }
  }
}

void Reduction::send_step(const Step& step) {
  std::vector<Destination> destinations;
  destinations.reserve(step.ranks.size());
  for (const int peer : step.ranks) {
    destinations.push_back({peer, step.given ? scale_ : 1.0, step.only_sender});
  }
  const size_t begin = step.elements.begin;
  send(destinations, step.message, step.given ? given(begin) : place(begin), step.elements.numel * item_);
}

Slice Reduction::changed() const {
  size_t begin = SIZE_MAX;
  size_t end = 0;
  for (const auto& strand : strands_) {
    for (const auto& step : strand.steps) {
      if (step.kind != Kind::kSend) {
        begin = std::min(begin, step.elements.begin);
        end = std::max(end, step.elements.begin + step.elements.numel);
      }
    }
  }
  return end > begin ? Slice{begin, end - begin} : Slice{0, 0};
}

// Returns whether the step combines only this rank's own tensor, unscaled and already in place.
bool Reduction::changes_nothing(const Step& step) const {
  return step.ranks.size() == 1 && scale_ == 1.0 && given(step.elements.begin) == place(step.elements.begin);
}

Operation::Action Reduction::advance() {
  if (computing_ != nullptr) {
    std::exchange(computing_, nullptr)->used = used();
  }
  bool ended = true;
  for (auto& strand : strands_) {
    const auto action = go_on(strand);
    if (action == Action::kCompute) {
      computing_ = &strand;
      return action;
    }
    ended = ended && action == Action::kDone;
  }
  return ended && announced() ? Action::kDone : Action::kWait;
}

Operation::Action Reduction::go_on(Strand& strand) {
  for (; !strand.ended(); ++strand.next) {
    const auto& step = strand.steps[strand.next];
    switch (step.kind) {
      case Kind::kSend:
        send_step(step);
        break;
      case Kind::kAwait:
        if (!received(step.message)) {
          return Action::kWait;
        }
        break;
      case Kind::kCombine: {
        if (changes_nothing(step)) {
          break;
        }
        select_input_step(step.message, strand.used);
        const auto action = use_inputs(step.elements.numel * item_);
        if (action != Action::kDone) {
          return action;
        }
        strand.used = 0;
        strand.combined += step.ranks.size() - 1;
        break;
      }
    }
  }
  return Action::kDone;
}

void Reduction::compute() {
  const auto& strand = *computing_;
  const auto& step = strand.steps[strand.next];
  const size_t first = step.elements.begin;
  std::vector<Input> inputs;
  std::vector<double> scales;
  bool scaled = false;
  size_t receive = strand.combined;
  for (const int peer : step.ranks) {
    if (peer == rank()) {
      inputs.push_back({step.given ? given(first) : place(first), {}});
      scales.push_back(step.given ? scale_ : 1.0);
    } else {
      inputs.push_back(input(strand.coming[receive]));
      scales.push_back(header(strand.coming[receive]).scale);
      ++receive;
    }
    scaled = scaled || scales.back() != 1.0;
  }
  auto op = static_cast<RedOp>(signature_.reduce_op);
  if ((op == RedOp::AVG && !step.last) || (op == RedOp::PREMUL_SUM && !scaled)) {
    op = RedOp::SUM;
  }
  for_pieces(inputs, item_, used() / item_, usable() / item_, [&](const std::vector<const void*>& where, size_t begin, size_t count) {
    reduce(op, dtype_, place(first + begin), where, scales, count, count_);
  });
}

} // namespace fog

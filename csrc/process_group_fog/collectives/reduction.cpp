#include "collectives/reduction.hpp"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

#include "core/arithmetic.hpp"

namespace fog {

using RedOp = c10d::ReduceOp::RedOpType;
using Kind = Schedule::Step::Kind;

Reduction::Reduction(const Terms& terms, Schedule schedule)
    : Operation(terms.signature),
      schedule_(std::move(schedule)),
      dtype_(terms.dtype),
      item_(c10::elementSize(terms.dtype)),
      scale_(terms.scale),
      count_(terms.layout.ranks.size()) {}

void Reduction::launch() {
  for (const auto& step : schedule_.steps) {
    const size_t bytes = step.elements.numel * item_;
    if (step.kind == Kind::kAwait) {
      receive(step.ranks[0], step.message, place(step.elements.begin), bytes);
    } else if (step.kind == Kind::kCombine) {
      for (const int peer : step.ranks) {
        if (peer != rank()) {
          coming_.push_back(receive_input(peer, step.message, bytes));
        }
      }
    }
  }
  announce();
  for (; next_ < schedule_.steps.size() && schedule_.steps[next_].kind == Kind::kSend; ++next_) {
    send_step(schedule_.steps[next_]);
  }
}

// Ranks that only send to another one, or only receive from it.
void Reduction::announce() {
  std::set<int> to;
  std::set<int> from;
  for (const auto& step : schedule_.steps) {
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
    destinations.push_back({peer, step.given ? scale_ : 1.0});
  }
  const size_t begin = step.elements.begin;
  send_after_theirs(destinations, step.message, step.given ? given(begin) : place(begin), step.elements.numel * item_);
}

Slice Reduction::changed() const {
  size_t begin = SIZE_MAX;
  size_t end = 0;
  for (const auto& step : schedule_.steps) {
    if (step.kind != Kind::kSend) {
      begin = std::min(begin, step.elements.begin);
      end = std::max(end, step.elements.begin + step.elements.numel);
    }
  }
  return end > begin ? Slice{begin, end - begin} : Slice{0, 0};
}

// This rank's own tensor, where it is already.
bool Reduction::changes_nothing(const Step& step) const {
  return step.ranks.size() == 1 && scale_ == 1.0 && given(step.elements.begin) == place(step.elements.begin);
}

Operation::Action Reduction::advance() {
  for (; next_ < schedule_.steps.size(); ++next_) {
    const auto& step = schedule_.steps[next_];
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
        if (!std::exchange(combining_, true)) {
          select_input_step(step.message);
        }
        const auto action = use_inputs(step.elements.numel * item_);
        if (action != Action::kDone) {
          return action;
        }
        combining_ = false;
        combined_ += step.ranks.size() - 1;
        break;
      }
    }
  }
  return announced() ? Action::kDone : Action::kWait;
}

void Reduction::compute() {
  const auto& step = schedule_.steps[next_];
  const size_t first = step.elements.begin;
  std::vector<Input> inputs;
  std::vector<double> scales;
  bool scaled = false;
  size_t receive = combined_;
  for (const int peer : step.ranks) {
    if (peer == rank()) {
      inputs.push_back({step.given ? given(first) : place(first), {}});
      scales.push_back(step.given ? scale_ : 1.0);
    } else {
      inputs.push_back(input(coming_[receive]));
      scales.push_back(header(coming_[receive]).scale);
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

#include "collectives/network_sum.hpp"

#include "core/arithmetic.hpp"

namespace fog {

using RedOp = c10d::ReduceOp::RedOpType;

NetworkSum::NetworkSum(const Signature& signature, NetworkSums& sums, const NetworkSums::Terms& terms)
    : Barrier(signature), sums_(sums), terms_(terms), divided_(terms.op != RedOp::AVG || terms.out == nullptr) {}

void NetworkSum::launch() {
  sum_ = sums_.add(terms_, shared_from_this());
  follow(sum_);
  Barrier::launch();
}

Operation::Action NetworkSum::advance() {
  if (!agreed_) {
    if (Barrier::advance() != Action::kDone) {
      return Action::kWait;
    }
    agreed_ = true;
    sum_->agreed();
  }
  if (!sum_->done()) {
    return Action::kWait;
  }
  if (divided_) {
    return Action::kDone;
  }
  divided_ = true;
  return Action::kCompute;
}

void NetworkSum::compute() {
  reduce(RedOp::AVG, terms_.dtype, terms_.out, {terms_.out}, {}, terms_.numel, static_cast<size_t>(size()));
}

} // namespace fog

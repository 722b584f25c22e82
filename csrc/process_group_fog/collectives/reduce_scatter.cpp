#include "collectives/reduce_scatter.hpp"

#include <c10/core/ScalarType.h>

namespace fog {

ReduceScatter::ReduceScatter(Signature signature, std::vector<const void*> inputs, std::vector<size_t> bytes, void* out, double scale)
    : Reduction(signature, scale), sends_from_(std::move(inputs)), bytes_(std::move(bytes)), out_(out) {}

void ReduceScatter::launch() {
  use_own_input(sends_from_[rank()]);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      expect_input(peer, bytes_[rank()]);
    }
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int peer = (rank() + distance) % size();
    send_after_theirs({{peer, scale()}}, 0, sends_from_[peer], bytes_[peer]);
  }
}

Operation::Action ReduceScatter::advance() {
  return use_inputs(bytes_[rank()]);
}

void ReduceScatter::compute() {
  reduce_into(out_);
}

} // namespace fog

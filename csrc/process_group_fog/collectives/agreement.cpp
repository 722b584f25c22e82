#include "collectives/agreement.hpp"

#include <ATen/Functions.h>

namespace fog {

Agreement::Agreement(Signature signature, int64_t number, std::vector<int> sources, std::vector<int> destinations)
    : Operation(signature),
      number_(number),
      sources_(std::move(sources)),
      destinations_(std::move(destinations)),
      numbers_(at::empty({static_cast<int64_t>(sources_.size())}, at::TensorOptions(at::kCPU).dtype(at::kLong))) {
  set_outputs({numbers_});
}

void Agreement::launch() {
  auto* place = numbers_.mutable_data_ptr<int64_t>();
  for (const int source : sources_) {
    if (source == rank()) {
      *place = number_;
    } else {
      receive(source, 0, place, sizeof(int64_t));
    }
    ++place;
  }
  std::vector<Destination> others;
  for (const int destination : destinations_) {
    if (destination != rank()) {
      others.push_back({destination});
    }
  }
  send(others, 0, &number_, sizeof(int64_t), true);
}

Operation::Action Agreement::advance() {
  return received(0) ? Action::kDone : Action::kWait;
}

} // namespace fog

#pragma once

#include <ATen/core/Tensor.h>

#include "engine/operation.hpp"

namespace fog {

// Before an exchange that somebody else carries: the peers of it see that they ask for the same, as they would in an operation of fog's
// own, and tell each other a number.
class Agreement : public Operation {
 public:
  // Signatures need not say 8 bytes. `sources` and `destinations` may hold this rank. The Work's result is the sources' numbers, an int64
  // vector in their order.
  Agreement(Signature signature, int64_t number, std::vector<int> sources, std::vector<int> destinations);

 protected:
  void launch() override;
  Action advance() override;

 private:
  const int64_t number_;
  const std::vector<int> sources_;
  const std::vector<int> destinations_;
  const at::Tensor numbers_;
};

} // namespace fog

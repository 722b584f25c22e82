#pragma once

#include <memory>

#include "collectives/barrier.hpp"
#include "transport/network_sums.hpp"

namespace fog {

// An allreduce, reduce or reduce_scatter over all ranks of the group that the network's library does itself.
//
// The library does not compare what ranks ask for, and would wait for one that does not come. So they go through a barrier with their
// signatures first: whoever gets out of it has seen, by the ranks before it, that all ask for the same.
class NetworkSum : public Barrier {
 public:
  NetworkSum(const Signature& signature, NetworkSums& sums, const NetworkSums::Terms& terms);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  NetworkSums& sums_; // the group's, which this keeps
  const NetworkSums::Terms terms_;
  std::shared_ptr<NetworkSums::Sum> sum_;
  bool agreed_ = false;
  bool divided_ = false;
};

} // namespace fog

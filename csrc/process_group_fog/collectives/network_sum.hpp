#pragma once

#include <memory>

#include "collectives/barrier.hpp"
#include "transport/network_sums.hpp"

namespace fog {

// An allreduce, reduce or reduce_scatter over all ranks of the group that the network's library does itself.
//
// The library does not compare the ranks' calls, and would wait forever for a rank that does not come. So the ranks
// first pass a barrier that compares their signatures: a rank that leaves the barrier knows that all ranks have called
// the same.
class NetworkSum : public Barrier {
 public:
  NetworkSum(const Signature& signature, NetworkSums& sums, const NetworkSums::Terms& terms);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  NetworkSums& sums_; // the group's, which this operation keeps alive
  const NetworkSums::Terms terms_;
  std::shared_ptr<NetworkSums::Sum> sum_;
  bool agreed_ = false;
  bool divided_ = false;
};

} // namespace fog

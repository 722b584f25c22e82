// The neighbors that take part in one neighbor exchange, with their weights. This part does not communicate.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fog {

struct WeightedPeer {
  int rank;
  double weight;
};

// Computes out = sum_j source_weight[j] * (weight that j sends with) * x_j + self_weight * x, in the order of
// `sources`; or, with `mean`, the plain mean over the sources and this rank. All weights are doubles. A plan never
// changes; copies share their peers.
class NeighborPlan {
 public:
  // Throws ValueError, naming the argument, for ranks out of range, this rank itself, duplicates, and weights that are
  // not finite; and, with `mean`, for weights other than 1.
  NeighborPlan(
      int rank,
      int size,
      double self_weight,
      const std::vector<std::pair<int, double>>& sources,
      const std::vector<std::pair<int, double>>& destinations,
      bool mean);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  double self_weight() const {
    return self_weight_;
  }
  const std::vector<WeightedPeer>& sources() const {
    return *sources_;
  }
  const std::vector<WeightedPeer>& destinations() const {
    return *destinations_;
  }
  bool mean() const {
    return mean_;
  }
  std::string describe() const;

 private:
  using Peers = std::shared_ptr<const std::vector<WeightedPeer>>;
  Peers checked(const char* argument, const std::vector<std::pair<int, double>>& peers) const;

  int rank_;
  int size_;
  double self_weight_;
  bool mean_;
  Peers sources_;
  Peers destinations_;
};

} // namespace fog

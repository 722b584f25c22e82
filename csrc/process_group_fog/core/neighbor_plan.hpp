// The neighbors that take part in one neighbor exchange, with their weights. This part does not communicate.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

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

// The terms of a neighbor average that count, in their order, with their weights.
struct NeighborWeights {
  // `scales` are the weights that the plan's sources sent with their tensors.
  NeighborWeights(const NeighborPlan& plan, c10::ArrayRef<double> scales);

  // Makes the sum own + sum over j of weight_j * decoded_j - (1 - self_weight) * decoded_own: then `own` says whether
  // this rank's decoded message counts, and the last weight, 1, is that of its own tensor.
  void conserve();

  c10::SmallVector<size_t, 8> sources; // places in the plan; this rank's own tensor comes after them
  bool own = false; // whether it counts
  c10::SmallVector<double, 8> weights; // not used for the mean
  bool mean = false; // the plain mean of all terms
};

} // namespace fog

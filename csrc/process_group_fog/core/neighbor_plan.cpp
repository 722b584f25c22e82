#include "core/neighbor_plan.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>

#include <c10/util/Exception.h>

namespace fog {

NeighborPlan::NeighborPlan(
    int rank,
    int size,
    double self_weight,
    const std::vector<std::pair<int, double>>& sources,
    const std::vector<std::pair<int, double>>& destinations,
    bool mean)
    : rank_(rank), size_(size), self_weight_(self_weight), mean_(mean) {
  TORCH_CHECK_VALUE(size > 0, "size: got ", size, "; allowed is 1 or more");
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "rank: got ", rank, "; allowed is 0 to ", size - 1);
  TORCH_CHECK_VALUE(std::isfinite(self_weight), "self_weight: got ", self_weight, "; allowed is a finite number");
  TORCH_CHECK_VALUE(!mean || self_weight == 1.0, "self_weight: got ", self_weight, "; a plan with mean=True takes weights of 1.0");
  sources_ = checked("sources", sources);
  destinations_ = checked("destinations", destinations);
}

NeighborPlan::Peers NeighborPlan::checked(const char* argument, const std::vector<std::pair<int, double>>& peers) const {
  std::vector<bool> seen(static_cast<size_t>(size_), false);
  std::vector<WeightedPeer> result;
  result.reserve(peers.size());
  for (const auto& [peer, weight] : peers) {
    TORCH_CHECK_VALUE(peer >= 0 && peer < size_, argument, ": got rank ", peer, "; allowed are ranks 0 to ", size_ - 1);
    TORCH_CHECK_VALUE(peer != rank_, argument, ": got this rank itself (", peer, "); its own part is self_weight");
    TORCH_CHECK_VALUE(!seen[peer], argument, ": rank ", peer, " is there twice; each peer may be named once");
    TORCH_CHECK_VALUE(std::isfinite(weight), argument, ": got weight ", weight, " for rank ", peer, "; allowed is a finite number");
    TORCH_CHECK_VALUE(
        !mean_ || weight == 1.0, argument, ": got weight ", weight, " for rank ", peer, "; a plan with mean=True takes weights of 1.0");
    seen[peer] = true;
    result.push_back({peer, weight});
  }
  return std::make_shared<const std::vector<WeightedPeer>>(std::move(result));
}

std::string NeighborPlan::describe() const {
  std::ostringstream text;
  auto list = [&](const char* name, const std::vector<WeightedPeer>& peers) {
    text << ", " << name << "={";
    for (size_t i = 0; i < peers.size(); ++i) {
      text << (i > 0 ? ", " : "") << peers[i].rank << ": " << peers[i].weight;
    }
    text << "}";
  };
  text << "NeighborPlan(rank=" << rank_ << ", size=" << size_ << ", self_weight=" << self_weight_;
  list("sources", sources());
  list("destinations", destinations());
  text << (mean_ ? ", mean=True)" : ")");
  return text.str();
}

NeighborWeights::NeighborWeights(const NeighborPlan& plan, c10::ArrayRef<double> scales) {
  mean = plan.mean() && std::all_of(scales.begin(), scales.end(), [](double scale) { return scale == 1.0; });
  const double share = plan.mean() ? 1.0 / static_cast<double>(scales.size() + 1) : 1.0;
  for (size_t i = 0; i < scales.size(); ++i) {
    const double weight = share * plan.sources()[i].weight * scales[i];
    if (mean || weight != 0.0) {
      sources.push_back(i);
      weights.push_back(weight);
    }
  }
  const double weight = share * plan.self_weight();
  own = mean || weight != 0.0;
  if (own) {
    weights.push_back(weight);
  }
}

void NeighborWeights::conserve() {
  if (mean) {
    std::fill(weights.begin(), weights.end(), 1.0 / static_cast<double>(weights.size()));
    mean = false;
  } else if (!own) {
    own = true;
    weights.push_back(0.0);
  }
  weights.back() -= 1.0;
  if (weights.back() == 0.0) { // a term of weight 0 is skipped, as elsewhere
    weights.pop_back();
    own = false;
  }
  weights.push_back(1.0);
}

} // namespace fog

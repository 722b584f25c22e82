// The division of a group's ranks among machines. This part does not communicate.
#pragma once

#include <cstdint>
#include <vector>

#include "core/signature.hpp"

namespace fog {

// The machines do not have to be hosts: any division of the group is allowed. The k-th rank of each machine has place
// k.
class Machines {
 public:
  // `ranks[m]` are the group ranks of machine m; `rank` is the calling rank in a group of `size` ranks. Throws
  // ValueError, as an error of `op`, unless each rank of the group is in exactly one machine.
  Machines(const char* op, std::vector<std::vector<int>> ranks, int rank, int size);

  // Takes a division that is known to be valid.
  Machines(std::vector<std::vector<int>> ranks, int rank);

  // Throws ValueError, as an error of `op`, unless all machines have the same number of ranks.
  void check_equal(const char* op) const;

  int count() const {
    return static_cast<int>(ranks_.size());
  }
  // This rank's machine and its place in it.
  int machine() const {
    return machine_;
  }
  int place() const {
    return place_;
  }
  // The ranks of all machines, of one, or of this rank's, by place.
  const std::vector<std::vector<int>>& all() const {
    return ranks_;
  }
  const std::vector<int>& ranks(int machine) const {
    return ranks_[machine];
  }
  const std::vector<int>& local() const {
    return ranks_[machine_];
  }
  // The machine of any rank, and the rank's place in it.
  int machine_of(int rank) const {
    return where_[rank].machine;
  }
  int place_of(int rank) const {
    return where_[rank].place;
  }
  int rank(int machine, int place) const {
    return ranks_[machine][place];
  }
  // The number of ranks of a machine, and the smallest and the largest such number.
  int size(int machine) const {
    return static_cast<int>(ranks_[machine].size());
  }
  int least() const {
    return least_;
  }
  int most() const {
    return most_;
  }
  // Adds the division to `signature`, so that ranks with different divisions disagree.
  void sign(Signature& signature) const;

 private:
  struct Where {
    int machine = 0;
    int place = 0;
  };
  void find(int rank);

  std::vector<std::vector<int>> ranks_;
  std::vector<Where> where_; // indexed by rank
  int machine_ = 0;
  int place_ = 0;
  int least_ = 0;
  int most_ = 0;
};

// The ranks that take part in a sum, in the order of the sum, and their hosts.
struct Layout {
  std::vector<int> ranks;
  int place; // index of this rank in `ranks`
  Machines hosts; // each with its ranks in the same order
};

// `hosts[i]` is the number of the host of group rank `ranks[i]`; `rank` is the calling rank.
Layout layout_of(std::vector<int> ranks, const std::vector<int>& hosts, int rank);

} // namespace fog

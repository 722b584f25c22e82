// How the ranks of a group are divided among machines. No communication here.
#pragma once

#include <cstdint>
#include <vector>

#include "core/signature.hpp"

namespace fog {

// The machines need not be hosts: any division of the group will do. The k-th ranks of all machines have place k.
class Machines {
 public:
  // `ranks[m]` are the group ranks of machine m; `rank` is this one, of a group of `size`. Throws ValueError, as an error of
  // `op`, unless each rank of the group is in exactly one machine.
  Machines(const char* op, std::vector<std::vector<int>> ranks, int rank, int size);

  // Of ranks that are known to be so divided.
  Machines(std::vector<std::vector<int>> ranks, int rank);

  // Throws ValueError, as an error of `op`, unless all machines have the same number of ranks.
  void check_equal(const char* op) const;

  int count() const {
    return static_cast<int>(ranks_.size());
  }
  // This rank's machine and its place there.
  int machine() const {
    return machine_;
  }
  int place() const {
    return place_;
  }
  // The ranks of a machine, by place; of this rank's.
  const std::vector<int>& ranks(int machine) const {
    return ranks_[machine];
  }
  const std::vector<int>& local() const {
    return ranks_[machine_];
  }
  // The machine of any of its ranks, and its place there.
  int machine_of(int rank) const {
    return where_[rank].machine;
  }
  int place_of(int rank) const {
    return where_[rank].place;
  }
  int rank(int machine, int place) const {
    return ranks_[machine][place];
  }
  // How many ranks a machine has, and how many the one with the fewest, and the one with the most.
  int size(int machine) const {
    return static_cast<int>(ranks_[machine].size());
  }
  int least() const {
    return least_;
  }
  int most() const {
    return most_;
  }
  // Makes ranks that call `signature` with other machines disagree.
  void sign(Signature& signature) const;

 private:
  struct Where {
    int machine = 0;
    int place = 0;
  };
  void find(int rank);

  std::vector<std::vector<int>> ranks_;
  std::vector<Where> where_; // by rank
  int machine_ = 0;
  int place_ = 0;
  int least_ = 0;
  int most_ = 0;
};

// Who takes part in a sum, in the order of the sum, and on which hosts they are.
struct Layout {
  std::vector<int> ranks;
  int place; // of this rank among them
  Machines hosts; // each with its ranks in that order
};

// `hosts[i]` is the number of the host of group rank `ranks[i]`; `rank` is this one.
Layout layout_of(std::vector<int> ranks, const std::vector<int>& hosts, int rank);

} // namespace fog

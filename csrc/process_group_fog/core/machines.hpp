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
  // How many ranks the smallest machine has.
  int least() const;
  // The machine of any rank.
  int machine_of(int rank) const;
  int rank(int machine, int place) const {
    return ranks_[machine][place];
  }
  // Makes ranks that call `signature` with other machines disagree.
  void sign(Signature& signature) const;

 private:
  std::vector<std::vector<int>> ranks_;
  int machine_ = 0;
  int place_ = 0;
};

} // namespace fog

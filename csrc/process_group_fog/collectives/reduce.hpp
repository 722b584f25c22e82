#pragma once

#include "collectives/reduction.hpp"
#include "collectives/schedules.hpp"

namespace fog {

// The root gets the reduction over all ranks, in place; the other ranks' tensors stay unchanged. The arithmetic is as
// in Allreduce.
class Reduce : public Reduction {
 public:
  Reduce(const Terms& terms, void* data, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  // The root's announcement goes to all ranks, because most only send.
  void announce() override;
  const char* given(size_t begin) const override {
    return data_ + begin * item();
  }
  char* place(size_t begin) const override {
    return sums_ + (begin - first_) * item();
  }

 private:
  tree::Family family() const;
  int from_root(int place) const {
    return (place + signature_.root) % size();
  }

  char* const data_;
  char* sums_ = nullptr;
  size_t first_ = 0; // element at which sums_ begins
  bool told_ = false; // the ranks below, that the root has come
};

} // namespace fog

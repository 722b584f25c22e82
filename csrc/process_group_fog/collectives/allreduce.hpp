#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// Every rank gets the reduction over all ranks, or over all members of a part of the group, in place.
//
// cutovers.hpp decides the path, and with it the order of the additions: directly in the order of the ranks, or by
// hosts.
class Allreduce : public Reduction {
 public:
  Allreduce(const Terms& terms, void* data, size_t numel);

 protected:
  const char* given(size_t begin) const override {
    return data_ + begin * item();
  }
  char* place(size_t begin) const override {
    return data_ + begin * item();
  }

 private:
  char* const data_;
};

} // namespace fog

#pragma once

#include "engine/operation.hpp"

namespace fog {

// A barrier in which every rank reports to rank 0, which releases all ranks once all have come, so it can name the
// missing ranks. Rank 0 also tells the others when it comes, so that they know whether it is missing itself.
// heard_from() says which ranks have come, also after the barrier's end.
class MonitoredBarrier : public Operation {
 public:
  MonitoredBarrier();

 protected:
  void launch() override;
  Action advance() override;

 private:
  bool released_ = false;
};

} // namespace fog

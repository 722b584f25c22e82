#pragma once

#include "engine/operation.hpp"

namespace fog {

// A barrier in which rank 0 hears from every rank itself and lets them go when all have come: it can say who is missing.
// It also tells them when it comes, so that they know whether to blame it. heard_from() says who has come, also afterwards.
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

// The base of the operations that sum over ranks: follows schedules.
#pragma once

#include <vector>

#include <c10/core/ScalarType.h>

#include "collectives/schedule.hpp"
#include "core/machines.hpp"
#include "engine/operation.hpp"

namespace fog {

class Reduction : public Operation {
 public:
  // The parameters of a sum.
  struct Terms {
    Signature signature;
    c10::ScalarType dtype; // of tensors here and of messages; may be wider than the signature's, see partial_dtype()
    double scale; // this rank's factor for PREMUL_SUM
    const Layout& layout; // of the participating ranks
  };

 protected:
  // The schedules are independent and proceed at the same time.
  Reduction(const Terms& terms, std::vector<Schedule> schedules);

  void launch() override;
  Action advance() override;
  void compute() override;

  // The memory of elements from `begin` on: of this rank's unchanged tensor, and of its partial sums and results.
  virtual const char* given(size_t begin) const = 0;
  virtual char* place(size_t begin) const = 0;

  // Called at the beginning: announcements between ranks that would not learn each other's signature otherwise.
  virtual void announce();
  // The elements that the steps change at place().
  Slice changed() const;
  size_t item() const {
    return item_;
  }

 private:
  using Step = Schedule::Step;

  void send_step(const Step& step);
  // The progress of one schedule.
  struct Strand {
    std::vector<Step> steps;
    size_t next = 0; // step
    size_t used = 0; // bytes of its inputs
    std::vector<size_t> coming{}; // receives of the inputs to combine, in the order of the schedule
    size_t combined = 0; // number of `coming` that have been combined

    bool ended() const {
      return next == steps.size();
    }
  };

  Action go_on(Strand& strand);
  bool changes_nothing(const Step& step) const;

  std::vector<Strand> strands_;
  const c10::ScalarType dtype_;
  const size_t item_; // bytes per element
  const double scale_;
  const size_t count_; // participating ranks
  Strand* computing_ = nullptr;
};

} // namespace fog

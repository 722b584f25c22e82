// What the operations that sum over ranks have in common: a schedule, which it follows.
#pragma once

#include <vector>

#include <c10/core/ScalarType.h>

#include "collectives/schedule.hpp"
#include "core/machines.hpp"
#include "engine/operation.hpp"

namespace fog {

class Reduction : public Operation {
 public:
  // What is summed.
  struct Terms {
    Signature signature;
    c10::ScalarType
        dtype; // of the tensors here, and of what travels; wider than the signature's where partial sums are not to be rounded
    double scale; // this rank's factor for PREMUL_SUM
    const Layout& layout; // of the ranks that take part
  };

 protected:
  // The schedules go on side by side: none of them waits for another.
  Reduction(const Terms& terms, std::vector<Schedule> schedules);

  void launch() override;
  Action advance() override;
  void compute() override;

  // Memory of elements from `begin` on: of this rank's tensor as it was given, and of its partial sums and results.
  virtual const char* given(size_t begin) const = 0;
  virtual char* place(size_t begin) const = 0;

  // Between those that would not learn otherwise what the other one has called; at the beginning.
  virtual void announce();
  // What the steps change at place().
  Slice changed() const;
  size_t item() const {
    return item_;
  }

 private:
  using Step = Schedule::Step;

  void send_step(const Step& step);
  // How far one schedule is.
  struct Strand {
    std::vector<Step> steps;
    size_t next = 0; // step
    size_t used = 0; // bytes of its inputs
    std::vector<size_t> coming; // receives of what is combined, in the order of the schedule
    size_t combined = 0; // of them

    bool ended() const {
      return next == steps.size();
    }
  };

  Action go_on(Strand& strand);
  bool changes_nothing(const Step& step) const;

  std::vector<Strand> strands_;
  const c10::ScalarType dtype_;
  const size_t item_; // bytes of an element
  const double scale_;
  const size_t count_; // ranks that take part
  Strand* computing_ = nullptr;
};

} // namespace fog

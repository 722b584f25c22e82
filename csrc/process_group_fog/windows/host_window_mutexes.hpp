// A window's mutexes, one for each pair of an owner and a neighbor, as this process sees them. For the window's own sources.
#pragma once

#include "windows/rank_mutex.hpp"
#include "windows/host_window.hpp"

namespace fog {

// In memory that this process has mapped.
class HostWindow::MappedMutex final : public RankMutex {
 public:
  MappedMutex(const HostWindow& window, const Neighbor& other, PairMutex& shared, PairMutex::Side side)
      : window_(window), other_(other), shared_(shared), side_(side) {}

 protected:
  bool acquire(Deadline deadline) override;
  bool try_acquire() override;
  void release() override;
  void check() override;
  void time_out() override;

 private:
  const HostWindow& window_;
  const Neighbor& other_;
  PairMutex& shared_;
  const PairMutex::Side side_;
};

// One that this process can only ask for: the owner's engine holds it.
class HostWindow::RemoteMutex final : public RankMutex {
 public:
  RemoteMutex(const HostWindow& window, const Neighbor& owner) : window_(window), owner_(owner) {}

 protected:
  bool acquire(Deadline deadline) override;
  bool try_acquire() override;
  void release() override;
  void check() override;
  void time_out() override;

 private:
  const HostWindow& window_;
  const Neighbor& owner_;
};

} // namespace fog

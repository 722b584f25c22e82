// Puts and gets by one-sided operations of the network: the neighbor's process takes no part in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "transport/mpi/remote_memory.hpp"
#include "windows/mailbox.hpp"
#include "windows/window_legs.hpp"

namespace fog {

// Values are put into this rank's mailbox there, see mailbox.hpp, and the neighbor's tensor is read in place.
// Operations that must be applied exactly once, or that need the neighbor, go as messages: accumulates, raw
// writes, signals, mutexes, and gets of a tensor that is not in the pool or that its owner keeps changing.
class Window::RemoteLeg final : public DirectLeg {
 public:
  // Returns null unless the neighbor can be reached one-sidedly.
  static std::unique_ptr<Leg> create(Window& window, Neighbor& neighbor, const WindowDescription& there);

  static constexpr const char* kName = "rma";
  const char* name() const override {
    return kName;
  }
  char* map() const override {
    return nullptr;
  }
  RankMutex::Other mutex() override {
    return messages_.mutex();
  }
  void leave() override;
  void on_closing() override;

 private:
  class Transfer;
  using Address = mpi::RemoteMemory::Address;

  RemoteLeg(Window& window, Neighbor& neighbor, mpi::RemoteMemory& memory, const PoolAddresses& there, Address mailbox);

  bool execute(Part& part) override;
  // For operations by message the neighbor's engine takes the mutex; this process needs it only for its own operations.
  bool needs_mutex(const Part& part) const override {
    return part.mutex && (part.op == WindowOp::kPut || part.op == WindowOp::kGet);
  }
  void send(Part& part);
  void put(const Part& part);
  // Writes weight * data to the neighbor's pool.
  void write(Transfer& transfer, Address to, const void* data, double weight) const;
  // Called if the neighbor has failed to read its mailbox between the puts; gives it some time.
  void let_read(Transfer& transfer, Deadline deadline);
  // Returns false if no consistent tensor could be read.
  bool get(const Part& part);

  mpi::RemoteMemory& memory_;
  const PeerId peer_;
  const PoolAddresses there_;
  const Address mailbox_;
  const MailboxLayout layout_;
  MessageLeg messages_;
  std::atomic<int> ahead_{0}; // what goes as messages and must not be overtaken by a get: gets and raw writes
  std::atomic<bool> left_{false};

  // --- for the writer, which holds Neighbor::writing ---
  std::atomic<uint64_t> puts_{0}; // number of the last put that may have been published
  bool published_ = true; // whether it certainly has been
  uint64_t p_number_ = 0; // of the last put with p
  double p_ = 0;
  uint64_t starves_ = 0; // the value of Mailbox::starves when it was last read
};

} // namespace fog

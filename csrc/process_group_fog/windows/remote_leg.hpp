// Puts and gets by operations of the network itself: the neighbor's process takes no part in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "transport/one_sided.hpp"
#include "windows/mailbox.hpp"
#include "windows/window_legs.hpp"

namespace fog {

// Values are put into this rank's mailbox there, see mailbox.hpp, and the neighbor's tensor is read where it is. What must be applied exactly
// once, or waits for something there, goes as a message: accumulates, raw writes, signals and mutexes, and gets of a tensor that is not in
// the pool, or that its owner keeps changing.
class Window::RemoteLeg final : public DirectLeg {
 public:
  // It returns null unless the neighbor is reached so.
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
  using Address = OneSided::Address;

  RemoteLeg(Window& window, Neighbor& neighbor, OneSided& memory, const PoolAddresses& there, Address mailbox);

  bool execute(Part& part) override;
  // The neighbor's engine takes it for a message, unless the mutex is for what this process does.
  bool needs_mutex(const Part& part) const override {
    return part.mutex && (part.op == WindowOp::kPut || part.op == WindowOp::kGet);
  }
  void send(Part& part);
  void put(const Part& part);
  // weight * data to the neighbor's pool.
  void write(Transfer& transfer, Address to, const void* data, double weight) const;
  // The neighbor has tried in vain to read what is put there; this gives it some time.
  void let_read(Transfer& transfer, Deadline deadline);
  // It returns false if there was no whole tensor to be had.
  bool get(const Part& part);

  OneSided& memory_;
  const PeerId peer_;
  const PoolAddresses there_;
  const Address mailbox_;
  const MailboxLayout layout_;
  MessageLeg messages_;
  std::atomic<int> ahead_{0}; // messages that a get must not overtake, nor another one's result: gets and raw writes
  std::atomic<bool> left_{false};

  // --- of the writer, who holds Neighbor::writing ---
  std::atomic<uint64_t> puts_{0}; // number of the last put that may have been published
  bool published_ = true; // for certain
  uint64_t p_number_ = 0; // of the last put with p
  double p_ = 0;
  uint64_t starves_ = 0; // as Mailbox::starves was when it was last read
};

} // namespace fog

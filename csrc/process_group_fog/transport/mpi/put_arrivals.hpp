// The receiver's side of notified puts, see notified_puts.hpp: what it lends, and what has come there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "transport/mpi/messages.hpp"
#include "transport/mpi/remote_memory.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {

// All that comes to a process. Every call needs the engine's lock.
class PutArrivals {
 public:
  PutArrivals(RemoteMemory& memory, Messages& messages) : memory_(memory), messages_(messages) {}

  // --- what peers say; DistBackendError where it cannot be ---
  void on_announcement(PeerId source, const Header& header);
  void on_placed(PeerId source, const Header& header);

  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner);
  // Nobody takes that.
  void ignore(PeerId source, const Header& header);
  // `owner` reads nothing any more.
  void abandon(const TransferOwner& owner);
  // Nothing of that group is taken any more.
  void withdraw_group(uint64_t group);
  // `source` has ended.
  void forget(PeerId source);

  // Looks for what has come; true if anything has.
  bool poll();
  // Whether somebody waits for something.
  bool must_poll() const {
    return waiting_ > 0;
  }
  // MPI cannot be called any more.
  void give_up();

 private:
  class Arrival;
  // What a peer has here.
  struct Lent {
    char* memory = nullptr;
    size_t slots = 0;
  };

  void grant(PeerId source);
  void take_by_message(Arrival& arrival, const std::shared_ptr<TransferOwner>& owner);
  // `taken` chunks of it, or all that there will be.
  void say_taken(Arrival& arrival, size_t taken);
  void close(Arrival& arrival);
  template <typename Which>
  void close_all(Which&& which);

  RemoteMemory& memory_;
  Messages& messages_;
  std::unordered_map<PeerId, Lent> lent_;
  std::map<std::pair<PeerId, uint64_t>, std::shared_ptr<Arrival>> arrivals_; // by source and its transfer
  size_t waiting_ = 0; // arrivals that somebody waits for
  size_t lent_bytes_ = 0;
  bool warned_ = false;
};

} // namespace fog::mpi

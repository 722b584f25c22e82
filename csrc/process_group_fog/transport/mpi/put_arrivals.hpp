// The receiver's side of notified puts, see notified_puts.hpp: the slots that it lends, and the data that arrives in
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "transport/mpi/remote_memory.hpp"
#include "transport/tcp/messages.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {

// All transfers to a process. Every call needs the engine's lock.
class PutArrivals {
 public:
  PutArrivals(RemoteMemory& memory, tcp::Messages& wire) : memory_(memory), wire_(wire) {}

  // --- messages of peers; they throw DistBackendError if these are not valid ---
  void on_announcement(PeerId source, const Header& header);
  void on_placed(PeerId source, const Header& header);

  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner);
  // No operation will receive this data.
  void ignore(PeerId source, const Header& header);
  // `owner` reads no more data.
  void abandon(const TransferOwner& owner);
  // No more data of that group is received.
  void withdraw_group(uint64_t group);
  // Handles the end of `source`.
  void forget(PeerId source);

  // Checks for arrived data. Returns true if there is any.
  bool poll();
  // Returns whether an operation waits for data.
  bool must_poll() const {
    return waiting_ > 0;
  }
  // Records that MPI cannot be called any more.
  void give_up();

 private:
  class Arrival;
  // The slots that a peer has here.
  struct Lent {
    char* memory = nullptr;
    size_t slots = 0;
  };

  void grant(PeerId source);
  void take_by_wire(Arrival& arrival, const std::shared_ptr<TransferOwner>& owner);
  // Tells the sender that an operation takes the data (kWanted), or that `taken` chunks, or kAll, were taken (kTaken).
  void tell(const Arrival& arrival, MessageKind kind, size_t taken);
  void close(Arrival& arrival);
  template <typename Which>
  void close_all(Which&& which);

  RemoteMemory& memory_;
  tcp::Messages& wire_;
  std::unordered_map<PeerId, Lent> lent_;
  std::map<std::pair<PeerId, uint64_t>, std::shared_ptr<Arrival>> arrivals_; // by source and its transfer
  size_t waiting_ = 0; // number of arrivals that an operation waits for
  size_t lent_bytes_ = 0;
  bool warned_ = false;
};

} // namespace fog::mpi

// The data of one message over MPI, in parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

#include "transport/mpi/messages.hpp"

namespace fog::mpi {

// Parts are so large that UCX's TCP writes them directly to their place. Up to about 3 MB it sends eagerly and copies
// once more, which took 1.3 times as long for 16 MiB.
inline constexpr size_t kPartBytes = size_t(4) << 20;
// The number of parts of one message that MPI receives at a time: enough for the fastest link, with little memory.
inline constexpr size_t kPartsAtOnce = 4;
// The number of parts that MPI sends at a time. They need no memory, but many of them make each look slower. MPI offers
// a part to its receiver before it sends it, and a late offer queues behind all earlier data on the same connection.
// With 4 parts the link was idle until the receiver had asked, and 64 MiB in both directions at 1 Gbit/s took 0.98 s
// instead of 0.57 s.
inline constexpr size_t kPartsOutAtOnce = 32;

// Data that is sent or received in parts.
class Messages::Data : public std::enable_shared_from_this<Data> {
 public:
  Data(Messages& messages, PeerId peer, uint32_t tag, size_t bytes, const std::shared_ptr<TransferOwner>& owner, bool goes_out)
      : bytes(bytes), goes_out(goes_out), messages_(messages), peer_(peer), tag_(static_cast<int>(tag)), owner_(owner) {}
  virtual ~Data() = default;

  // Hands parts to MPI, up to the limit.
  void start();
  // Does the same for a transfer that was started earlier. Errors become failures of this transfer.
  void go_on();
  void on_part(size_t part, const std::string& error);
  const std::shared_ptr<TransferOwner>& owner() const {
    return owner_;
  }
  PeerId peer() const {
    return peer_;
  }
  void stop() {
    stopped_ = true;
  }

  const size_t bytes;
  const bool goes_out;

 protected:
  size_t parts() const {
    return (bytes + kPartBytes - 1) / kPartBytes;
  }
  // Returns the address of this part.
  virtual char* place_of(size_t part) = 0;
  virtual bool may_start(size_t part) const {
    return in_flight_ < (goes_out ? kPartsOutAtOnce : kPartsAtOnce);
  }
  virtual const char* call_name() const = 0;
  virtual int call(char* place, int count, int peer, int tag, MPI_Comm comm, MPI_Request* request) = 0;
  virtual void on_complete(size_t part, const std::string& error) = 0;
  // Called when MPI has no part of it any more and will get none.
  virtual void on_end() {}
  bool is_complete() const {
    return in_flight_ == 0 && started_ == parts();
  }

  Messages& messages_;
  size_t started_ = 0; // number of parts
  size_t in_flight_ = 0;

 private:
  const PeerId peer_;
  const int tag_;
  std::shared_ptr<TransferOwner> owner_;
  bool stopped_ = false;
};

} // namespace fog::mpi

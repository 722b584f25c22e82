// Data of one message over MPI, in parts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>

#include "transport/mpi/messages.hpp"

namespace fog::mpi {

// They are so large that UCX's TCP brings them straight to their place; up to some 3 MB it sends eagerly and copies once more, which took
// 1.3 times as long for 16 MiB.
inline constexpr size_t kPartBytes = size_t(4) << 20;
// Parts of one message's data that MPI has at a time to receive: enough for the fastest link, few enough that memory for them is little.
inline constexpr size_t kPartsAtOnce = 4;
// And to send, which takes no memory, but a look costs more with many. MPI offers a part to its receiver before it sends it, and the offer of
// a part that it gets late comes behind all the data before it, on the same connection: with 4 of them the link then was idle until the
// receiver had asked, and 64 MiB both ways at 1 Gbit/s took 0.98 s in place of 0.57.
inline constexpr size_t kPartsOutAtOnce = 32;

// Data that goes or comes in parts.
class Messages::Data : public std::enable_shared_from_this<Data> {
 public:
  Data(Messages& messages, PeerId peer, uint32_t tag, size_t bytes, const std::shared_ptr<TransferOwner>& owner, bool goes_out)
      : bytes(bytes), goes_out(goes_out), messages_(messages), peer_(peer), tag_(static_cast<int>(tag)), owner_(owner) {}
  virtual ~Data() = default;

  // Hands parts to MPI, as many as may be there.
  void start();
  // The same of a transfer that others have begun; whatever goes wrong is its own failure.
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
  // Where the next part is.
  virtual char* place_of(size_t part) = 0;
  virtual bool may_start(size_t part) const {
    return in_flight_ < (goes_out ? kPartsOutAtOnce : kPartsAtOnce);
  }
  virtual const char* call_name() const = 0;
  virtual int call(char* place, int count, int peer, int tag, MPI_Comm comm, MPI_Request* request) = 0;
  virtual void on_complete(size_t part, const std::string& error) = 0;
  // MPI has no part of it any more, and gets none.
  virtual void on_end() {}
  bool is_complete() const {
    return in_flight_ == 0 && started_ == parts();
  }

  Messages& messages_;
  size_t started_ = 0; // parts
  size_t in_flight_ = 0;

 private:
  const PeerId peer_;
  const int tag_;
  std::shared_ptr<TransferOwner> owner_;
  bool stopped_ = false;
};

} // namespace fog::mpi

// Large data of one message over TCP. It waits in its sender until the receiver has room for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace fog::tcp {

// Called when a peer no longer reads the memory. An empty text means success.
using Sent = std::function<void(const std::string& error)>;

struct OutgoingData {
  uint32_t tag = 0;
  const char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<TransferOwner> owner; // keeps the data alive
  Sent sent;
  size_t room = 0; // the receiver has room up to this byte
  size_t begun = 0; // the bytes up to this one are sent, or in the part that is being sent
  bool going = false; // is in the queue of its channel
  bool stopped = false; // the receiver wants no more, or the owner has withdrawn it
};

// Data that is received directly into its place, or into a ring of memory where the owner reads it. Every call needs the
// engine's lock.
class IncomingData final : public Incoming {
 public:
  // Tells the sender that there is room up to that byte.
  using Grant = std::function<void(size_t room)>;

  // With a place, `owner` keeps it alive. Call grant_room() next.
  IncomingData(const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner, Grant grant);

  size_t available() const override {
    return come_;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override;
  bool take(size_t bytes) override;
  bool in_place() const override {
    return place_ != nullptr;
  }

  struct Room {
    char* at;
    size_t bytes;
  };
  // Returns the memory of the next bytes, as far as it is contiguous; none if the sender may not send any.
  Room room() const;
  // These bytes have been written there.
  void come(size_t bytes);
  bool is_complete() const {
    return come_ == bytes_;
  }
  void grant_room();

  bool is_of(const TransferOwner& owner) const {
    return listener_.lock().get() == &owner;
  }
  // No more data comes: the sender has withdrawn it.
  void withdraw() {
    withdrawn_ = true;
  }
  // Ends the use of the place; the owner must be released without the lock.
  std::shared_ptr<TransferOwner> end() {
    return std::move(owner_);
  }
  // Tells the owner of progress.
  void tell() const;

 private:
  // The memory of data without a place: enough for a fast link.
  static constexpr size_t kMemory = size_t(4) << 20;

  const size_t bytes_;
  char* const place_;
  // A weak pointer, because the owner holds this object.
  const std::weak_ptr<TransferOwner> listener_;
  std::shared_ptr<TransferOwner> owner_;
  const Grant grant_;
  c10::DataPtr memory_;
  size_t capacity_;
  size_t come_ = 0;
  size_t taken_ = 0;
  size_t granted_ = 0;
  bool withdrawn_ = false;
};

} // namespace fog::tcp

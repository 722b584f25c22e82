// The transport between the processes of a job: shared memory on one host, and TCP between hosts; large data goes by MPI
// RMA if the fabric moves it by itself.
//
// On one host data is in the sender's arena and is read there, or it streams through chunks. If the system supports
// neither, the data goes by TCP, but its header takes the usual way, so that the order of messages between two ranks is
// kept.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "job/process_watch.hpp"
#include "transport/mpi/notified_puts.hpp"
#include "transport/mpi/remote_memory.hpp"
#include "transport/shared_memory/links.hpp"
#include "transport/shared_memory/streams.hpp"
#include "transport/tcp/messages.hpp"
#include "transport/transport.hpp"

namespace fog {

class ProcessTransport final : public Transport, private MessageHandler {
 public:
  // `links` are settled. `remote_memory` is null if no data goes by RMA. `links` or `connections` must know each process.
  ProcessTransport(
      PeerId self,
      MessageHandler& handler,
      std::unique_ptr<shared_memory::Links> links,
      std::unique_ptr<tcp::Connections> connections,
      std::unique_ptr<mpi::RemoteMemory> remote_memory);

  std::string address() const override {
    return links_.address(true);
  }
  void attach(PeerId peer, int pid, const std::string& address) override {
    processes_.watch(peer, pid);
    links_.attach(peer, address);
  }
  void connect(PeerId peer, const std::string& tcp) override;
  bool is_connected_with(PeerId peer) const override {
    return links_.attached_by(peer) || wire_.connections().fd(peer) >= 0;
  }
  bool knows(PeerId peer) const override {
    return links_.reaches(peer) || wire_.connections().knows(peer);
  }
  void renew(PeerId peer) override {
    forget(peer);
    processes_.forget(peer);
    links_.renew(peer);
    held_.erase(peer);
    if (remote_memory_) {
      remote_memory_->leave(peer);
    }
  }
  std::vector<PeerId> spoken_with() const override;
  bool has_spoken_with(PeerId peer) const override {
    return links_.has_spoken_with(peer) || wire_.has_spoken_with(peer);
  }
  size_t unsent(PeerId peer) const override {
    return links_.unsent(peer) + wire_.unsent(peer);
  }
  void depart() override {
    links_.depart();
    wire_.depart();
  }
  std::vector<Ended> ended() override;
  Pulse& pulse() override {
    return links_.pulse();
  }
  std::optional<Signs> signs_of(PeerId peer) override {
    const auto signs = links_.signs_of(peer);
    return signs ? signs : wire_.signs_of(peer);
  }
  void expel(PeerId peer) override {
    links_.expel(peer);
    wire_.expel(peer);
  }
  std::vector<PeerId> expelled_by() override {
    auto peers = links_.expelled_by();
    const auto others = wire_.expelled_by();
    peers.insert(peers.end(), others.begin(), others.end());
    return peers;
  }
  void watch(PeerId peer) override {
    if (!links_.reaches(peer)) {
      wire_.watch(peer);
    }
  }
  bool shares_memory(PeerId peer) const override {
    return links_.reaches(peer);
  }
  std::string way_to(PeerId peer) const override;
  void forget(PeerId peer) override;
  void forget(PeerId peer, uint64_t group) override;

  using Transport::send;
  Sent send(
      c10::ArrayRef<Destination> destinations,
      const Header& header,
      const void* data,
      Memory memory,
      const std::shared_ptr<TransferOwner>& owner) override;
  std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) override;
  void hold_back(PeerId peer, bool hold) override {
    if (hold) {
      held_.insert(peer);
    } else {
      held_.erase(peer);
    }
  }
  void withdraw(const TransferOwner& owner) override;
  void withdraw_group(uint64_t group) override;
  void ignore(PeerId source, const Header& header) override;

  mpi::RemoteMemory* one_sided(PeerId peer) override {
    const bool reaches = remote_memory_ && remote_memory_->completes_alone() && remote_memory_->reaches(peer);
    return reaches && !links_.reaches(peer) ? remote_memory_.get() : nullptr;
  }

  bool poll() override;
  bool must_poll() override {
    return wire_.must_poll() || uses_mpi();
  }
  bool data_moves() const override;
  bool sending() const override {
    return wire_.sending() || (puts_ && puts_->sending()) || !mapped_.empty() || links_.waiting_for_space();
  }
  bool give_up() override;
  std::vector<std::shared_ptr<TransferOwner>> take_released() override;

  Doorbell& bell() override {
    return links_.doorbell();
  }
  bool news() const override {
    return links_.news() || wire_.connections().news();
  }
  bool waiting_for_space() const override {
    return links_.waiting_for_space();
  }
  void before_sleep() override {
    wire_.connections().before_sleep();
  }

 private:
  class ToSeveral;
  class Mapped;
  enum class Way { kInline, kMapped, kStream, kFragments, kRemote, kPayload };
  struct Reading {
    std::shared_ptr<ToSeveral> outgoing;
    std::shared_ptr<TransferOwner> owner;
    PeerId peer;
  };

  bool uses_mpi() const {
    return remote_memory_ && !given_up_;
  }
  // Returns whether data for `destination` must stay here, because the peer has asked for that or too much data waits
  // for it already.
  bool holds_back(PeerId destination) const;
  void send_header(PeerId peer, const Header& header, const void* data, size_t bytes);
  Way way_of(PeerId destination, const Header& header, const void* data, Memory memory) const;
  void on_local(PeerId source, const char* record, size_t length);
  void end(Reading reading);
  template <typename Which>
  void drop_mapped(bool withdraw, Which&& which);

  void on_message(PeerId source, const Header& header, const char* data) override;
  const Peers& peers() const override {
    return handler_.peers();
  }

  const PeerId self_;
  const int max_ranks_;
  MessageHandler& handler_;
  ProcessWatch processes_;
  const std::unique_ptr<shared_memory::Links> owned_links_;
  shared_memory::Links& links_;
  shared_memory::Streams streams_;
  tcp::Messages wire_;
  const std::unique_ptr<mpi::RemoteMemory> remote_memory_;
  std::unique_ptr<mpi::NotifiedPuts> puts_; // null without remote memory
  std::unique_ptr<mpi::PutArrivals> arrivals_; // null without remote memory
  std::unordered_map<uint64_t, Reading> mapped_; // by transfer: data in this process's arena that peers read
  std::unordered_map<PeerId, std::vector<char>> fragments_; // of the next message of a peer of this host
  std::unordered_set<PeerId> held_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  bool given_up_ = false; // MPI cannot be called any more
  std::chrono::steady_clock::time_point put_; // when data moved by RMA last
};

} // namespace fog

// Messages over TCP: to processes of other hosts, and to those with which memory cannot be shared.
//
// A connection carries messages in order, and parts of large data between them. Data leaves its sender when its receiver
// has a place for it, so data that nobody takes delays no message, and takes no memory.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/tcp/channel.hpp"
#include "transport/tcp/connections.hpp"
#include "transport/wire.hpp"

namespace fog::tcp {

// Every call needs the engine's lock unless its comment says otherwise.
class Messages final : public Wire, private Connections::User, private Channel::User {
 public:
  // `engine` counts a process as ended only once it has told all that depend on it. `handler` may know sooner.
  Messages(std::unique_ptr<Connections> connections, MessageHandler& handler, MessageHandler& engine);
  ~Messages() override;

  void send(PeerId destination, const Header& header, const void* data, size_t bytes) override;
  uint32_t next_tag(PeerId destination) override {
    return link(destination).channel.next_tag();
  }
  void send_data(
      PeerId destination,
      uint32_t tag,
      const void* data,
      size_t bytes,
      bool held,
      bool waits,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent) override;
  // No data waits for it: it travels in both directions at once, and delays no message.
  void go(const TransferOwner& owner, std::optional<PeerId> destination) override {}
  std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) override;
  void abandon(const TransferOwner& owner) override;

  bool poll() override;
  bool must_poll() const override {
    return connections_->must_poll();
  }
  bool sending() const override;
  bool has_spoken_with(PeerId peer) const override {
    return links_.count(peer) > 0;
  }
  size_t unsent(PeerId destination) const override {
    const auto found = links_.find(destination);
    return found == links_.end() ? 0 : found->second->channel.unsent();
  }
  std::vector<std::shared_ptr<TransferOwner>>& released() override {
    return released_;
  }

  struct CutOff {
    PeerId peer;
    const char* why;
  };
  // Returns the peers whose connection has broken, or that could not be reached, and whose end is not known.
  std::vector<CutOff> cut_off();
  // Closes the connection to that peer.
  void forget(PeerId peer);
  // Another process, which listens at `line`, has that number from now on. The one before was forgotten, if there was one.
  void renew(PeerId peer, const std::string& line);
  Connections& connections() {
    return *connections_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    Link(PeerId peer, Channel::User& user) : channel(peer, user) {}
    Channel channel;
    bool watches_writes = false;
    bool closed = false;
    size_t most_unsent = 0;
    uint64_t written = 0; // at `measured`
    Clock::time_point measured;
  };
  struct Broken {
    CutOff cut;
    Clock::time_point report;
  };

  void on_open(PeerId peer) override;
  void on_readable(PeerId peer) override;
  void on_writable(PeerId peer) override;
  void on_message(PeerId source, const char* record, size_t length) override;
  void release(std::shared_ptr<TransferOwner> owner) override {
    released_.push_back(std::move(owner));
  }
  std::unique_ptr<char[]>& spare_buffer() override {
    return spare_buffer_;
  }
  const std::shared_ptr<Link>& shared_link(PeerId peer);
  Link& link(PeerId peer) {
    return *shared_link(peer);
  }
  void check_reachable(PeerId peer) const;
  // Writes what waits, or begins to connect.
  void flush(PeerId peer, Link& link);
  void break_off(PeerId peer, Link& link);
  // Measures the rate of a connection whose socket is full, and limits what waits in it.
  void measure(PeerId peer, Link& link);
  void limit_unsent(PeerId peer, Link& link, size_t bytes);

  const std::unique_ptr<Connections> connections_;
  MessageHandler& handler_;
  MessageHandler& engine_;
  std::unordered_map<PeerId, std::shared_ptr<Link>> links_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  std::vector<Broken> broken_;
  std::unique_ptr<char[]> spare_buffer_;
  bool progressed_ = false; // in this poll
};

} // namespace fog::tcp

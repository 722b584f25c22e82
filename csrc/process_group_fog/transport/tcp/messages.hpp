// The wire: messages over TCP, to processes of other hosts and to those with which memory cannot be shared.
//
// A connection carries messages in order, and parts of large data between them. Data leaves its sender when its receiver
// has a place for it, so data that nobody takes delays no message, and takes no memory.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/pulse.hpp"
#include "transport/tcp/channel.hpp"
#include "transport/tcp/connections.hpp"
#include "transport/tcp/growth.hpp"

namespace fog::tcp {

// Every call needs the engine's lock unless its comment says otherwise.
class Messages final : private Connections::User, private Channel::User {
 public:
  // `pulse` has this process's signs of life.
  Messages(std::unique_ptr<Connections> connections, MessageHandler& handler, const Pulse& pulse);
  ~Messages() override;

  // Sends a header with a copy of the data, or without data. Throws Unreachable.
  void send(PeerId destination, const Header& header, const void* data, size_t bytes);
  // Returns the next tag for the data of a message, so that a receiver may take the data of one sender in any order.
  uint32_t next_tag(PeerId destination) {
    return link(destination).channel.next_tag();
  }
  // What goes before the receiver asks for it. The header must have gone by this wire.
  enum class Early {
    kNothing,
    kOverLongPath, // as much as a long path holds
    kToReceiver, // a part in any case, as the receiver has only one sender
  };
  // Sends the data of a message with that tag. `owner` is kept alive until the data is not read any more.
  void send_data(
      PeerId destination,
      uint32_t tag,
      const void* data,
      size_t bytes,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent,
      Early early);
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner);
  // Nobody will receive the data of that message.
  void ignore(PeerId source, const Header& header) {
    link(source).channel.ignore(header.payload_tag);
    flush(source, link(source));
  }
  // Tells that `owner` reads no more data, and that its data may change.
  void abandon(const TransferOwner& owner);

  bool poll();
  // Returns whether news may come that does not ring the doorbell.
  bool must_poll() const {
    return connections_->must_poll();
  }
  // Returns whether messages may still be on their way out of this process.
  bool sending() const;
  // Returns whether any message has gone to that peer or come from it.
  bool has_spoken_with(PeerId peer) const {
    return links_.count(peer) > 0;
  }
  // Returns the bytes of small messages to a peer that have not left.
  size_t unsent(PeerId destination) const {
    const auto found = links_.find(destination);
    return found == links_.end() ? 0 : found->second->channel.unsent();
  }
  // Owners whose last transfer has ended.
  std::vector<std::shared_ptr<TransferOwner>>& released() {
    return released_;
  }

  // Begins to watch for the end of that peer, unless it shares memory with this process.
  void watch(PeerId peer);
  // Processes that connect from now on are told that this one has ended in good order.
  void depart() {
    departed_ = true;
  }
  // Asks a connected peer for its signs of life, unless it was asked lately. Returns the last ones, or zeros if it has not
  // answered yet; null if there is no connection.
  std::optional<Signs> signs_of(PeerId peer);
  // Tells a connected peer that this process counts it as lost.
  void expel(PeerId peer);
  // Returns the peers that count this process as lost, and have not been returned before.
  std::vector<PeerId> expelled_by();
  // Closes the connection to that peer.
  void forget(PeerId peer);
  // Another process, which listens at `line`, has that number from now on. The one before was forgotten, if there was one.
  void renew(PeerId peer, const std::string& line);
  // Returns how data goes there: "tcp", with the number of connections if there are several.
  std::string way_to(PeerId peer) const;
  Connections& connections() const {
    return *connections_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Link {
    Link(PeerId peer, Channel::User& user) : channel(peer, user) {}
    Channel channel;
    std::vector<bool> watches_writes = {false}; // by the number of the connection
    Growth growth;
    std::optional<Header> goodbye; // it has come, before data that the peer had sent by other connections
    bool ended = false; // the other side has closed the first connection after that
    bool closed = false;
    bool departed = false; // the peer has said goodbye
    bool expelled = false; // it has said that it counts this process as lost
    Clock::time_point asked; // for its signs of life
    bool answers = false; // it is expected to answer
    Signs signs;
    size_t most_unsent = 0;
    uint64_t written = 0; // at `measured`
    Clock::time_point measured;
    size_t in_flight = 0; // what a long path holds, at `looked`
    Clock::time_point looked;
  };

  void on_open(PeerId peer) override;
  void on_open_additional(PeerId peer, size_t number, bool own) override;
  void on_readable(PeerId peer, size_t number) override;
  void on_writable(PeerId peer, size_t number) override;
  void on_message(PeerId source, const char* record, size_t length) override;
  void on_ask(PeerId source) override {
    link(source).channel.tell(read_signs(pulse_, Clock::now()));
  }
  void on_signs(PeerId source, const Signs& signs) override;
  void on_expelled(PeerId source) override {
    link(source).expelled = true;
    expelled_by_.push_back(source);
  }
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
  // Writes by one open connection what it takes.
  void write(PeerId peer, Link& link, size_t number);
  // A connection has ended.
  void on_end(PeerId peer, Link& link, size_t number);
  void break_off(PeerId peer, Link& link);
  // Measures the rate of a connection whose socket is full, and limits what waits in it.
  void measure(PeerId peer, Link& link);
  void limit_unsent(PeerId peer, Link& link, size_t bytes);
  // Asks for another connection if there are fewer than fixed_.
  void grow_to_fixed(PeerId peer, const Link& link);
  // Returns how many bytes may go early now.
  size_t early_room(PeerId peer, Link& link, Early early);

  const std::unique_ptr<Connections> connections_;
  MessageHandler& handler_;
  std::unordered_map<PeerId, std::shared_ptr<Link>> links_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  const Pulse& pulse_;
  const size_t fixed_; // by so many connections data goes to a peer; 0 if that is measured
  std::vector<PeerId> expelled_by_;
  bool departed_ = false;
  std::unique_ptr<char[]> spare_buffer_;
  bool progressed_ = false; // in this poll
};

} // namespace fog::tcp

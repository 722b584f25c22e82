// The creation of a group: its ranks tell each other, through a Store, what they need to connect.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/group.hpp"
#include "job/hosts.hpp"
#include "job/peer_information.hpp"
#include "job/rendezvous.hpp"
#include "transport/shared_memory/links.hpp"
#include "transport/tcp/connections.hpp"

namespace fog {

// Sets up one group, once.
class GroupSetup {
 public:
  GroupSetup(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, Rendezvous::Gone gone);
  ~GroupSetup();
  GroupSetup(const GroupSetup&) = delete;
  GroupSetup& operator=(const GroupSetup&) = delete;

  // Exchanges what the ranks tell about themselves. The first groups also create the world.
  void exchange(const std::string& name);

  uint64_t id() const {
    return ranks_[0].random;
  }
  std::vector<Member> members() const;
  std::vector<std::string> addresses() const;
  // Call when no rank needs the exchanged data any more.
  void finish() {
    rendezvous_->finish();
  }

 private:
  void check_one_world(const std::string& name) const;
  void check_secret() const;
  // The second step, if the hosts are not known yet: the ranks find out which of them share a host.
  void find_hosts();
  // Returns whether all ranks share one host and its memory.
  bool all_linked() const;
  // Returns whether MPI is to move large data, if it can; the same on all ranks.
  bool wants_rma() const;
  // Creates the transport, and starts MPI if it is to move data.
  void make_transport();
  // Listens for messages; returns where, or nothing without a secret, as nobody could connect.
  std::string listen();
  std::vector<std::string> hosts() const; // by rank
  // Returns whether all ranks of the world take part.
  bool is_world() const;
  bool is_new_world() const;
  bool has_several_hosts() const;

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::chrono::milliseconds timeout_;
  const Beacon beacon_; // until all ranks have looked for it
  std::unique_ptr<shared_memory::Links> links_; // for the transport to be created
  std::unique_ptr<tcp::Connections> connections_; // for the transport to be created
  std::vector<PeerInformation> ranks_;
};

} // namespace fog

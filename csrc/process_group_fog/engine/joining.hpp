// How a process comes into a job that runs already, in the place of one that is gone or as a further rank: over shared
// memory on the host of ranks that are left, and over TCP between hosts. Who joins, and when, is decided in Python
// (fogdist.elastic); here are the connections.
//
// The process that joins begins with the job's first group, which takes no work on it, and with no connection. It asks
// the members for attention (announce), and tells each its entry. When the members have agreed that it is one of them,
// each admits it: it empties the ring of the process that has ended, and attaches the new one. Only when that is seen
// may the new one attach the member. Between hosts both sides connect. So both wait for each other, for less than a
// millisecond on one host if both run, and for a few round trips between hosts.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"

namespace fog {

// What a process tells others about itself, so that they can connect: the text of an PeerInformation. Empty if no process
// can join this one's world: it has none yet.
std::string own_entry();

// Draws the attention of the process with this entry. Returns false if it has ended, or does not answer; that of a process
// of another host may take seconds.
bool announce(const std::string& entry);

// Returns whether the process with this entry shares this one's host and its memory, if it runs: announce() then knows at
// once.
bool is_visible(const std::string& entry);

// Makes this process world rank `rank` of a job that began with `size` ranks, without a connection. `rank` may be a later
// one on one host. `entries`: those of members, at least one. `store_host`: that of the job's store, "" if it is not
// reached by TCP. Throws DistBackendError if their build is another one, or they and this process cannot reach each other,
// and ValueError if the job cannot have that rank.
void prepare_to_join(
    int rank, int size, const std::vector<std::string>& entries, const std::string& store_host, std::chrono::milliseconds timeout);

// Creates the job's first group, which refuses all work, with this reason. `hosts`: the number of each rank's host when
// the job started, up to this rank at least.
std::shared_ptr<Group> add_whole(
    uint64_t id, const std::string& name, int rank, const std::vector<int>& hosts, const std::string& reason);

// Connects this process with others, by world rank, which connect with this one at the same time. `is_member`: this
// process is a member of the job, and the others join. Returns the ranks that have come; the others are lost.
std::vector<int> connect_with(const std::map<int, std::string>& entries, bool is_member, std::chrono::milliseconds timeout);

} // namespace fog

// How data goes between hosts, and who sums it there: what the user has asked for.
#pragma once

#include <cstddef>
#include <string>

namespace fog {

enum class BetweenHosts {
  kAuto, // one-sidedly where the fabric moves data while the target takes no part, by messages elsewhere
  kRma,
  kMessages,
};

// "auto", "rma" or "messages".
const char* name_of(BetweenHosts way);

// What a group's options say, or where they say nothing FOG_BETWEEN_HOSTS, or where that is missing kAuto. The first group of the process
// decides for all. Throws ValueError if it is none of the names, or another than the first group's.
void choose_between_hosts(const std::string& option);

// The choice of the first group; that of the environment before there is one.
BetweenHosts between_hosts();

// Who does allreduce, reduce and reduce_scatter of a group whose ranks are on several hosts.
enum class SumsBy {
  kFog,
  kMpi, // its own nonblocking reductions, where it has the dtype and the reduction
};

// "fog" or "mpi".
const char* name_of(SumsBy sums);

// What a group's options say, or where they say nothing FOG_REDUCE, or where that is missing kFog. Throws ValueError if it is none of the
// names.
SumsBy sums_by(const std::string& option);

// How much memory of this process others can reach one-sidedly: FOG_RMA_BYTES, or 256 MiB. Throws ValueError if that is no such number.
size_t rma_bytes();

// FOG_LOCAL_LINKS=0: ranks of one host reach this one as if they were on others.
bool has_local_links();

} // namespace fog

// The probe of MPI RMA, which the ranks of a job make once.
#pragma once

#include <chrono>
#include <string>

#include "job/mpi_runtime.hpp"
#include "job/rendezvous.hpp"

namespace fog::mpi {

// What the probe has found, the same on all ranks.
struct Answer {
  std::string fault; // why RMA is not used; empty if it is
  bool alone = false; // a put completes while its target is outside of MPI; otherwise once the target calls MPI
};

// Rank 0 puts a word into the pool of the lowest rank of another node, which first stays outside of MPI and then calls it.
// Under kAuto the two then measure whether puts move 16 MiB faster than a TCP connection. All ranks call this, with a
// window over pools, whose `memory` nothing else uses yet.
Answer probe(Runtime& runtime, Rendezvous& rendezvous, MPI_Win window, char* memory, std::chrono::milliseconds timeout);

} // namespace fog::mpi

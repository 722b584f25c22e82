// Connections between processes of different hosts that carry nothing: the system closes them when a process ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace fog::mpi {

// Makes one TCP connection with each of some other processes. MPI does not tell that a process of another host has ended:
// MPICH 5.0.2 crashes in the next send to it (UCX) or does not return from it (OFI).
class Lifelines {
 public:
  // Listens at all addresses of this machine.
  Lifelines();
  ~Lifelines();
  Lifelines(const Lifelines&) = delete;
  Lifelines& operator=(const Lifelines&) = delete;

  // Where others reach this process, without line breaks; empty if they cannot.
  std::string address() const;

  // Connects with the processes at these addresses, which call it as well, within `limit`. Returns a descriptor for each that has come,
  // which the caller owns. Whoever is not there then is left out, perhaps on one side only.
  //
  // `token`: what all have in common, and no stranger who happens to connect.
  std::map<int, int> connect(
      int rank, const std::map<int, std::string>& addresses, uint64_t token, std::chrono::milliseconds limit);

 private:
  int listener_ = -1;
};

} // namespace fog::mpi

// What this process's operations did last, in memory that other programs can read even while this one hangs or is stopped: `fog dump` shows it.
//
// One anonymous file (memfd) of fixed size. The engine writes under its lock: a few hundred bytes an operation, no call of the system. A slot has a
// version, odd while it is written, so that a reader in another process sees a slot as it was at one moment.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/signature.hpp"

namespace fog {

class FlightRecord {
 public:
  static constexpr size_t kSlots = 256;
  static constexpr size_t kNamed = 16; // ranks that an operation waits for, in a slot

  // Without a file, where the system has none, nothing is recorded.
  FlightRecord(int rank, int size, const std::string& host);
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // An operation begins. The number is for what follows; an operation that finds no slot, as all others are in flight, has 0.
  uint64_t begin(const Signature& signature, const std::string& group, int rank, uint64_t sequence, uint64_t key);
  // A rank of the operation's group.
  struct Awaited {
    int32_t rank;
    int32_t pid; // 0 if it is on another host
  };
  // It has waited for a while, and still does, for `count` ranks, the first of which are these.
  void wait(uint64_t number, const std::vector<Awaited>& awaited, size_t count);
  void end(uint64_t number, bool failed);

  struct Operation {
    std::string what; // "allreduce(SUM, float32[3])"
    std::string group;
    int rank; // in the group
    uint64_t number; // of the group's operations on this rank
    uint64_t key; // the same on all ranks
    std::string state; // "in flight", "done", "failed"
    double age; // seconds since it began
    double seconds; // from its begin to its end, or until now
    std::vector<Awaited> awaited; // the first few; known after a second
    int awaited_count;
  };
  struct Process {
    int pid;
    int rank;
    int size;
    std::string host;
    uint64_t unrecorded; // operations for which there was no slot
    std::vector<Operation> operations; // oldest first
  };
  // What another process of this host has recorded. Throws ValueError if it has no record, or one of another version of fog.
  static Process read(pid_t pid);

 private:
  struct Slot;
  struct File;

  Slot* slot_of(uint64_t number) const;

  File* file_ = nullptr;
  int fd_ = -1;
  uint64_t next_ = 1;
};

} // namespace fog

// A record of this process's last operations and of the progress of its training, in memory that other programs can read
// even while this process hangs or is stopped. `fog dump` and `fog top` show it.
//
// The record is one anonymous file (memfd) of fixed size. The engine writes a few hundred bytes per operation under its
// lock, without system calls. The version of a slot is odd while the slot is written, so a reader in another process
// gets a consistent state of the slot. The numbers beside the slots are single words, which need no version.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/signature.hpp"

namespace fog {

class FlightRecord {
 public:
  static constexpr size_t kSlots = 256;
  static constexpr size_t kNamed = 16; // the most awaited ranks in a slot
  static constexpr int kPeers = 1024; // world ranks from here on have no numbers of their own

  // Records nothing if the system has no memfd. It lives until the process ends, so that others can still read it.
  FlightRecord(int rank, int size, const std::string& host, const std::string& script);
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  // Records the start of an operation. Returns its number for wait() and end(), or 0 if operations in flight occupy all
  // slots.
  uint64_t begin(const Signature& signature, const std::string& group, int rank, uint64_t sequence, uint64_t key);
  // A rank of the operation's group.
  struct Awaited {
    int32_t rank;
    int32_t pid; // 0 if it is on another host
  };
  // Records that the operation is waiting for `count` ranks; `awaited` holds the first of them.
  void wait(uint64_t number, const std::vector<Awaited>& awaited, size_t count);
  void end(uint64_t number, bool failed);

  // For a forked child, whose parent's record it is.
  static void forget_in_child() noexcept;
  // These write to the record of this process, if there is one.
  // A message of a world rank has come for the operation; of the last one, the time since the one before is counted.
  static void note_arrival(uint64_t number, int peer) noexcept;
  static void note_lost(int peer, bool lost = true) noexcept; // a world rank was lost
  // The progress of the training; any thread may call these, without the engine's lock.
  static void note_step() noexcept; // a step has ended
  static void note_epoch(int64_t epoch) noexcept; // of the membership
  static void note_job(uint64_t job) noexcept; // when there is one
  static void note_staleness(int peer, int64_t exchanges) noexcept; // of a world rank's values

  // What a record says, by the names that Python shows.
  using Value = std::variant<int64_t, uint64_t, double, bool, std::string, std::vector<std::pair<int, int>>>;
  using Fields = std::map<std::string, Value>;
  struct Process {
    Fields fields;
    std::vector<Fields> operations; // oldest first
    std::vector<Fields> peers; // those with numbers
  };
  // Reads the record of another process on this host. Throws ValueError if it has no record, or one of another version
  // of fog.
  static Process read(pid_t pid);

 private:
  struct Slot;
  struct File;

  Slot* slot_of(uint64_t number) const;
  static File* file_of_process() noexcept;
  static std::vector<Fields> peers_of(const File& file);

  File* file_ = nullptr;
  uint64_t next_ = 1;
};

} // namespace fog

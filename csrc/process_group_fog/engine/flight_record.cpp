#include "engine/flight_record.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/shared_memory/memfd.hpp"

namespace fog {
namespace {

constexpr const char* kName = "fog_flight_record";
constexpr uint64_t kMagic = 0x34646365'72676f66; // "fogrecd4"; another layout needs another number
constexpr int kTries = 1000; // attempts to read a slot that is being written

enum class State : uint8_t { kNone, kInFlight, kDone, kFailed };

// The time of CLOCK_MONOTONIC, which is the same for all processes of a host.
int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

// The record of this process. Only its engine makes one, and virtual ranks have none.
std::atomic<FlightRecord*> of_process{nullptr};

// Adds to a word that one thread at a time writes, without the cost of an atomic addition.
template <typename Number>
void add(std::atomic<Number>& to, Number number) {
  to.store(to.load(std::memory_order_relaxed) + number, std::memory_order_relaxed);
}

// Returns a text of another process, which may have damaged it: it need not end, and may be cut within a character.
template <size_t kSize>
std::string text_of(const std::array<char, kSize>& from) {
  return text_from_peer(from.data(), strnlen(from.data(), kSize));
}

template <size_t kSize>
void copy_text(std::array<char, kSize>& to, const std::string& from) {
  const size_t length = std::min(from.size(), kSize - 1);
  std::memcpy(to.data(), from.data(), length);
  to[length] = '\0';
}

} // namespace

struct FlightRecord::Slot {
  std::atomic<uint32_t> version;
  State state;
  int32_t rank;
  int32_t awaited_count;
  uint64_t number;
  uint64_t sequence;
  uint64_t key;
  int64_t began;
  int64_t ended;
  // Only for the writer: when the last message came, and the one before or the start; and the sender, -1 for none.
  int64_t arrived;
  int64_t arrived_before;
  int32_t source;
  Signature signature;
  std::array<Awaited, kNamed> awaited;
  std::array<char, 48> group;

  template <typename Write>
  void change(Write&& write) {
    version.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    write();
    version.fetch_add(1, std::memory_order_release);
  }
};

struct FlightRecord::File {
  uint64_t magic;
  uint32_t slot_bytes;
  int32_t pid;
  int32_t rank;
  int32_t size;
  std::array<char, 64> host;
  std::array<char, 128> script;
  // A process that is about to be read has a file of zeros, so "unknown" is 0 here, and other values are one more.
  struct Numbers {
    std::atomic<int64_t> waited; // nanoseconds
    std::atomic<int64_t> staleness_plus_one;
    std::atomic<int64_t> lost;
  };
  std::atomic<uint64_t> job;
  std::atomic<uint64_t> unrecorded;
  std::atomic<uint64_t> begun;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> steps;
  std::atomic<int64_t> stepped; // the time of the last step
  std::atomic<int64_t> epoch_plus_one;
  std::array<Numbers, kPeers> peers;
  std::array<Slot, kSlots> slots;
};

FlightRecord::FlightRecord(int rank, int size, const std::string& host, const std::string& script) {
  const int fd = shared_memory::create_memfd(kName, sizeof(File));
  if (fd < 0) {
    return;
  }
  void* memory = mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    close(fd);
    return;
  }
  file_ = static_cast<File*>(memory); // all zero: no operations
  file_->slot_bytes = sizeof(Slot);
  file_->pid = static_cast<int32_t>(getpid());
  file_->rank = rank;
  file_->size = size;
  copy_text(file_->host, host);
  copy_text(file_->script, script);
  std::atomic_thread_fence(std::memory_order_release);
  file_->magic = kMagic;
  of_process.store(this, std::memory_order_release);
}

FlightRecord::Slot* FlightRecord::slot_of(uint64_t number) const {
  auto& slot = file_->slots[number % kSlots];
  return slot.number == number ? &slot : nullptr;
}

uint64_t FlightRecord::begin(const Signature& signature, const std::string& group, int rank, uint64_t sequence, uint64_t key) {
  if (file_ == nullptr) {
    return 0;
  }
  add<uint64_t>(file_->begun, 1);
  // Operations in flight keep their slots: the oldest of them is usually the cause of a hang.
  for (size_t tries = 0; tries < kSlots; ++tries) {
    const uint64_t number = next_++;
    auto& slot = file_->slots[number % kSlots];
    if (slot.state == State::kInFlight) {
      continue;
    }
    slot.change([&] {
      slot.state = State::kInFlight;
      slot.rank = rank;
      slot.awaited_count = 0;
      slot.number = number;
      slot.sequence = sequence;
      slot.key = key;
      slot.began = now();
      slot.arrived = slot.began;
      slot.source = -1;
      slot.signature = signature;
      copy_text(slot.group, group);
    });
    return number;
  }
  file_->unrecorded.fetch_add(1, std::memory_order_relaxed);
  return 0;
}

void FlightRecord::wait(uint64_t number, const std::vector<Awaited>& awaited, size_t count) {
  if (number == 0) {
    return;
  }
  if (auto* slot = slot_of(number)) {
    slot->change([&] {
      slot->awaited_count = static_cast<int32_t>(count);
      std::copy_n(awaited.begin(), std::min(awaited.size(), kNamed), slot->awaited.begin());
    });
  }
}

void FlightRecord::end(uint64_t number, bool failed) {
  if (file_ != nullptr && failed) {
    add<uint64_t>(file_->failed, 1);
  }
  if (number == 0) {
    return;
  }
  if (auto* slot = slot_of(number)) {
    slot->change([&] {
      slot->state = failed ? State::kFailed : State::kDone;
      slot->ended = now();
    });
    if (slot->source >= 0 && slot->source < kPeers) {
      add<int64_t>(file_->peers[slot->source].waited, slot->arrived - slot->arrived_before);
    }
  }
}

void FlightRecord::note_arrival(uint64_t number, int peer) noexcept {
  const auto* record = number == 0 ? nullptr : of_process.load(std::memory_order_acquire);
  if (auto* slot = record == nullptr ? nullptr : record->slot_of(number)) {
    slot->arrived_before = std::exchange(slot->arrived, now());
    slot->source = peer;
  }
}

void FlightRecord::note_lost(int peer, bool lost) noexcept {
  if (auto* file = file_of_process(); file != nullptr && peer >= 0 && peer < kPeers) {
    file->peers[peer].lost.store(lost ? 1 : 0, std::memory_order_relaxed);
  }
}

void FlightRecord::forget_in_child() noexcept {
  of_process.store(nullptr);
}

void FlightRecord::note_step() noexcept {
  if (auto* file = file_of_process()) {
    file->steps.fetch_add(1, std::memory_order_relaxed);
    file->stepped.store(now(), std::memory_order_relaxed);
  }
}

void FlightRecord::note_epoch(int64_t epoch) noexcept {
  if (auto* file = file_of_process()) {
    file->epoch_plus_one.store(epoch + 1, std::memory_order_relaxed);
  }
}

void FlightRecord::note_job(uint64_t job) noexcept {
  if (auto* file = file_of_process()) {
    file->job.store(job, std::memory_order_relaxed);
  }
}

void FlightRecord::note_staleness(int peer, int64_t exchanges) noexcept {
  if (auto* file = file_of_process(); file != nullptr && peer >= 0 && peer < kPeers) {
    file->peers[peer].staleness_plus_one.store(exchanges + 1, std::memory_order_relaxed);
  }
}

FlightRecord::File* FlightRecord::file_of_process() noexcept {
  const auto* record = of_process.load(std::memory_order_acquire);
  return record == nullptr ? nullptr : record->file_;
}

std::vector<FlightRecord::Fields> FlightRecord::peers_of(const File& file) {
  std::vector<Fields> peers;
  for (int rank = 0; rank < kPeers; ++rank) {
    const auto& numbers = file.peers[rank];
    const double waited = seconds(numbers.waited.load()); // in which only its message was missing
    const int64_t staleness = numbers.staleness_plus_one.load() - 1; // exchanges; -1 if unknown
    const bool lost = numbers.lost.load() != 0;
    if (waited > 0 || staleness >= 0 || lost) {
      peers.push_back({{"rank", int64_t(rank)}, {"waited", waited}, {"staleness", staleness}, {"lost", lost}});
    }
  }
  return peers;
}

FlightRecord::Process FlightRecord::read(pid_t pid) {
  const auto folder = "/proc/" + std::to_string(pid) + "/fd";
  DIR* directory = opendir(folder.c_str());
  TORCH_CHECK_VALUE(
      directory != nullptr, "pid: got ", pid, "; ", errno == EACCES ? "that process is another user's" : "there is no such process");
  int fd = -1;
  while (const dirent* entry = readdir(directory)) {
    const auto path = folder + '/' + entry->d_name;
    std::array<char, 256> target = {};
    if (readlink(path.c_str(), target.data(), target.size() - 1) > 0 && std::strstr(target.data(), kName) != nullptr) {
      fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
      break;
    }
  }
  closedir(directory);
  TORCH_CHECK_VALUE(fd >= 0, "pid: got ", pid, "; that process has no group of fog");
  const void* memory = mmap(nullptr, sizeof(File), PROT_READ, MAP_SHARED, fd, 0);
  const bool whole = lseek(fd, 0, SEEK_END) == static_cast<off_t>(sizeof(File));
  close(fd);
  TORCH_CHECK_VALUE(memory != MAP_FAILED, "pid: got ", pid, "; its record cannot be read");
  const std::unique_ptr<const File, void (*)(const File*)> file(
      static_cast<const File*>(memory), [](const File* mapped) { munmap(const_cast<File*>(mapped), sizeof(File)); });
  TORCH_CHECK_VALUE(
      whole && file->magic == kMagic && file->slot_bytes == sizeof(Slot), "pid: got ", pid,
      "; that process runs another version of fog");
  TORCH_CHECK_VALUE(file->pid == pid, "pid: got ", pid, ", which is a fork of process ", file->pid, " and has no group of its own");
  const auto steps = file->steps.load();
  Process process;
  process.fields = {
      {"pid", int64_t(file->pid)},
      {"rank", int64_t(file->rank)},
      {"size", int64_t(file->size)},
      {"host", text_of(file->host)},
      {"job", file->job.load()}, // the same on all ranks, and no other job's; 0 if there is none yet
      {"script", text_of(file->script)},
      {"unrecorded", file->unrecorded.load()}, // operations without a free slot
      {"begun", file->begun.load()},
      {"failed", file->failed.load()},
      {"steps", steps},
      {"step_age", steps > 0 ? seconds(now() - file->stepped.load()) : -1.0}, // since the last step ended
      {"epoch", file->epoch_plus_one.load() - 1}}; // of the membership; -1 if unknown
  process.peers = peers_of(*file);
  std::map<uint64_t, Fields> found; // by number
  for (const auto& slot : file->slots) {
    for (int tries = 0; tries < kTries; ++tries) {
      const auto version = slot.version.load(std::memory_order_acquire);
      const Slot& seen = slot;
      const auto state = seen.state;
      const auto group = seen.group;
      const auto awaited = seen.awaited;
      const auto signature = seen.signature;
      const int64_t time = now();
      std::vector<std::pair<int, int>> first; // of those that it waits for, recorded after a second
      for (int each = 0; each < std::clamp<int>(seen.awaited_count, 0, kNamed); ++each) {
        first.emplace_back(awaited[each].rank, awaited[each].pid);
      }
      Fields operation{
          {"group", text_of(group)},
          {"rank", int64_t(seen.rank)}, // in the group
          {"number", seen.sequence}, // of the operation among the group's operations on this rank
          {"key", seen.key}, // the same on all ranks
          {"state",
           std::string(
               state == State::kInFlight   ? "in flight"
                   : state == State::kDone ? "done"
                                           : "failed")},
          {"age", seconds(time - seen.began)},
          {"seconds", seconds((state == State::kInFlight ? time : seen.ended) - seen.began)}, // to its end, or until now
          {"awaited", std::move(first)},
          {"awaited_count", int64_t(seen.awaited_count)}};
      const uint64_t number = seen.number;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (version % 2 != 0 || slot.version.load(std::memory_order_relaxed) != version) {
        continue;
      }
      if (state != State::kNone) {
        const auto what = signature.describe(); // "allreduce(SUM, float32[3])"
        operation["what"] = text_from_peer(what.data(), what.size());
        found.emplace(number, std::move(operation));
      }
      break;
    }
  }
  for (auto& [number, operation] : found) {
    process.operations.push_back(std::move(operation));
  }
  return process;
}

} // namespace fog

#include "windows/mailbox.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

namespace fog {
namespace {

// Reads that puts may spoil before the owner asks the origin for a pause.
constexpr int kTries = 2;
// Attempts to read a put whose header has another number; more attempts mean damaged memory.
constexpr int kMostLooks = 1000;

} // namespace

void MailboxReader::absorb() {
  if (mailbox_.version.load(std::memory_order_acquire) != 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    take_latest();
  }
}

void MailboxReader::take_latest() {
  auto& place = view_.slot(slot_);
  const auto* memory = reinterpret_cast<const char*>(&mailbox_);
  auto version = mailbox_.version.load(std::memory_order_acquire);
  bool starves = false;
  int looks = 0; // at this version
  for (int tries = 0; version != absorbed_; ++tries) {
    if (tries == kTries) {
      starves = true;
      mailbox_.starves.store(1, std::memory_order_release);
    }
    const bool read = place.slot.may_have_been_read();
    const unsigned buffer = place.slot.writers_buffer();
    PutHeader header;
    std::memcpy(&header, memory + layout_.header(version), sizeof(header));
    values_.scale(view_.buffer(place, buffer), memory + layout_.value(version), 1.0, read);
    std::atomic_thread_fence(std::memory_order_acquire); // the data was read before the version is read again
    const auto now = mailbox_.version.load(std::memory_order_acquire);
    if (now != version) {
      version = now;
      looks = 0;
      continue;
    }
    if (header.number == version) {
      const bool has_p = header.p_number > p_absorbed_;
      place.slot.put(buffer, has_p ? std::make_optional(header.p) : std::nullopt, version - absorbed_);
      p_absorbed_ = std::max(p_absorbed_, header.p_number);
      absorbed_ = version;
      break;
    }
    TORCH_CHECK_WITH(
        DistBackendError, ++looks < kMostLooks, "fog: put ", version, " of a neighbor has the header of put ", header.number,
        " in this rank's memory. Is it damaged?");
    sched_yield();
  }
  if (starves) {
    mailbox_.starves.store(0, std::memory_order_release);
  }
}

void MailboxReader::accumulate(double weight, std::optional<double> p, uint64_t number, const void* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  take_latest();
  if (absorbed_ <= number) {
    values_.write(view_, slot_, WindowOp::kAccumulate, weight, p, data);
  } else if (p && p_absorbed_ <= number) { // a later put has replaced the values, but not p
    values_.write(view_, slot_, WindowOp::kAccumulate, 0.0, p, data);
  }
}

} // namespace fog

#include "transport/shared_memory/inbox.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <random>
#include <sstream>

#include "transport/shared_memory/machine.hpp"
#include "transport/shared_memory/memfd.hpp"

namespace fog::shared_memory {
namespace {

size_t pages(size_t bytes) {
  const size_t page = machine().page;
  return (bytes + page - 1) / page * page;
}

} // namespace

size_t Inbox::bytes_for(int ranks) {
  return pages(sizeof(Shared)) + pages(sizeof(Slot) * static_cast<size_t>(ranks)) + kChunks * kChunkBytes;
}

Inbox::Slot* Inbox::slots() const {
  return reinterpret_cast<Slot*>(reinterpret_cast<char*>(shared_) + pages(sizeof(Shared)));
}

Inbox::Inbox(int fd, std::string address) : fd_(fd), address_(std::move(address)) {}

Inbox::~Inbox() {
  if (shared_ != nullptr) {
    unmap_memfd(shared_, bytes_);
  }
  close(fd_);
}

std::unique_ptr<Inbox> Inbox::create() {
  const int fd = create_memfd("fog_inbox");
  if (fd < 0) {
    return nullptr;
  }
  std::random_device device;
  const uint64_t token = (static_cast<uint64_t>(device()) << 32) | device();
  std::ostringstream address;
  address << getpid() << ' ' << fd << ' ' << token;
  auto inbox = std::unique_ptr<Inbox>(new Inbox(fd, address.str()));
  return pwrite(fd, &token, sizeof(token), offsetof(Shared, token)) == sizeof(token) ? std::move(inbox) : nullptr;
}

bool Inbox::open(int ranks) {
  const size_t bytes = bytes_for(ranks);
  void* memory = fix_size(fd_, bytes) ? map_memfd(fd_, bytes, PROT_READ | PROT_WRITE) : nullptr;
  if (memory == nullptr) {
    return false;
  }
  shared_ = static_cast<Shared*>(memory);
  bytes_ = bytes;
  return true;
}

std::unique_ptr<Inbox> Inbox::attach(const std::string& address, int ranks) {
  auto inbox = find(address);
  return inbox && inbox->open(ranks) ? std::move(inbox) : nullptr;
}

std::unique_ptr<Inbox> Inbox::find(const std::string& address) {
  std::istringstream fields(address);
  int pid = 0;
  int number = 0;
  uint64_t token = 0;
  if (!(fields >> pid >> number >> token)) {
    return nullptr;
  }
  const int fd = open_memfd_of(pid, number);
  if (fd < 0) {
    return nullptr;
  }
  auto inbox = std::unique_ptr<Inbox>(new Inbox(fd, address));
  uint64_t its_token = 0; // checked first, so that another file is not changed
  const bool found = pread(fd, &its_token, sizeof(its_token), offsetof(Shared, token)) == sizeof(its_token) && its_token == token;
  return found ? std::move(inbox) : nullptr;
}

void Inbox::renew(int writer) const {
  auto& slot = slots()[writer];
  slot.peer.store(0);
  slot.ring.written.store(0);
  slot.ring.read.store(0);
  slot.ring.writer_waits.store(0);
}

bool Inbox::announce(const std::string& address) {
  const auto inbox = find(address);
  const size_t bytes = pages(sizeof(Shared));
  struct stat file = {};
  // An inbox that is not open yet is empty.
  if (!inbox || fstat(inbox->fd_, &file) != 0 || static_cast<size_t>(file.st_size) < bytes) {
    return false;
  }
  void* memory = map_memfd(inbox->fd_, bytes, PROT_READ | PROT_WRITE);
  if (memory == nullptr) {
    return false;
  }
  static_cast<Shared*>(memory)->pulse.announced.fetch_add(1);
  unmap_memfd(memory, bytes);
  return true;
}

void Inbox::drop(uint32_t index) const {
  const auto offset = bytes_ - (kChunks - index) * kChunkBytes;
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), kChunkBytes);
}

void Inbox::withdraw(uint64_t transfer) const {
  const uint32_t count = withdrawals();
  shared_->withdrawn[count % kWithdrawn].store(transfer, std::memory_order_relaxed);
  shared_->withdrawals.store(count + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst); // before the memory is reused; pairs with the fence in stands()
}

bool Inbox::stands(uint64_t transfer, uint32_t before) const {
  std::atomic_thread_fence(std::memory_order_acquire); // after reading the data
  const uint32_t count = shared_->withdrawals.load(std::memory_order_acquire);
  bool found = false;
  for (uint32_t number = before; number != count && count - before < kWithdrawn; ++number) {
    found = found || shared_->withdrawn[number % kWithdrawn].load(std::memory_order_relaxed) == transfer;
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  // It is unknown for transfers that are no longer recorded, so return false.
  return !found && shared_->withdrawals.load(std::memory_order_relaxed) - before < kWithdrawn;
}

} // namespace fog::shared_memory

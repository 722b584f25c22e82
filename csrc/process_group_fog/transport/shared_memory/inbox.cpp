#include "transport/shared_memory/inbox.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <sstream>

#include "transport/shared_memory/machine.hpp"
#include "transport/shared_memory/memfd.hpp"
#include "transport/shared_memory/process_memory.hpp"

namespace fog::shared_memory {
namespace {

size_t pages(size_t bytes) {
  const size_t page = machine().page;
  return (bytes + page - 1) / page * page;
}

void* map(int fd, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

} // namespace

size_t Inbox::bytes_for(int ranks) {
  return pages(sizeof(Shared)) + pages(sizeof(Slot) * static_cast<size_t>(ranks)) + kWindows * kWindowBytes;
}

Inbox::Slot* Inbox::slots() const {
  return reinterpret_cast<Slot*>(reinterpret_cast<char*>(shared_) + pages(sizeof(Shared)));
}

Inbox::Inbox(int fd, void* memory, size_t bytes, std::string address, int owner, uintptr_t owners_view)
    : fd_(fd),
      shared_(static_cast<Shared*>(memory)),
      bytes_(bytes),
      address_(std::move(address)),
      owner_(owner),
      owners_view_(owners_view) {}

Inbox::~Inbox() {
  munmap(shared_, bytes_);
  close(fd_);
}

std::unique_ptr<Inbox> Inbox::create(int ranks) {
  const size_t bytes = bytes_for(ranks);
  const int fd = create_memfd("fog_inbox", bytes);
  if (fd < 0) {
    return nullptr;
  }
  void* memory = map(fd, bytes);
  if (memory == nullptr) {
    close(fd);
    return nullptr;
  }
  permit_siblings_to_read();
  std::random_device device;
  const uint64_t token = (static_cast<uint64_t>(device()) << 32) | device();
  static_cast<Shared*>(memory)->token = token;
  std::ostringstream address;
  address << getpid() << ' ' << fd << ' ' << token << ' ' << bytes << ' ' << reinterpret_cast<uintptr_t>(memory);
  return std::unique_ptr<Inbox>(new Inbox(fd, memory, bytes, address.str(), getpid(), reinterpret_cast<uintptr_t>(memory)));
}

std::unique_ptr<Inbox> Inbox::attach(const std::string& address, int ranks) {
  std::istringstream fields(address);
  int pid = 0;
  int number = 0;
  uint64_t token = 0;
  size_t bytes = 0;
  uintptr_t owners_view = 0;
  if (!(fields >> pid >> number >> token >> bytes >> owners_view)) {
    return nullptr;
  }
  size_t there = 0;
  const int fd = open_memfd(pid, number, &there);
  if (fd < 0) {
    return nullptr;
  }
  void* memory = there == bytes && bytes == bytes_for(ranks) ? map(fd, bytes) : nullptr;
  if (memory == nullptr) {
    close(fd);
    return nullptr;
  }
  auto inbox = std::unique_ptr<Inbox>(new Inbox(fd, memory, bytes, address, pid, owners_view));
  return inbox->shared_->token == token ? std::move(inbox) : nullptr;
}

bool Inbox::owner_is_readable() const {
  uint64_t token = 0;
  return read_process_memory(owner_, reinterpret_cast<const void*>(owners_view_), &token, sizeof(token)) == 0 &&
      token == shared_->token;
}

} // namespace fog::shared_memory

#include "cuda/peer_memory.hpp"

#include <cstring>
#include <utility>

#include <c10/util/Exception.h>

#include "cuda/releases.hpp"

namespace fog::cuda {
namespace {

// Of everything that kernels read in packs, and of what different sides write.
constexpr size_t kAlignment = 256;
// CUDA shares memory in pages of this size: with less than one, what else lies there would be shared as well.
constexpr size_t kPage = size_t(2) << 20;

size_t aligned(size_t bytes, size_t alignment = kAlignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct Offer {
  IpcHandle handle;
  PeerLayout layout;
};

} // namespace

PeerLayout::PeerLayout(const at::Tensor& of, size_t its_slots, size_t its_doors) {
  size_t end = 0;
  const auto place = [&end](size_t size) {
    const size_t begin = end;
    end = aligned(end + size);
    return begin;
  };
  slots = place(its_slots * sizeof(WindowSlot));
  doors = place(its_doors * sizeof(WindowDoor));
  p = place(sizeof(double));
  began = place(sizeof(unsigned long long));
  any = place(sizeof(int));
  failed = place(sizeof(int));
  signal = place(sizeof(int));
  practice = place(sizeof(WindowDoor));
  sum = place(sizeof(Sum));
  control = end;
  storage = place(of.storage().nbytes());
  tensor = storage + static_cast<size_t>(of.storage_offset()) * static_cast<size_t>(of.element_size());
  stride = aligned(of.nbytes());
  buffers = place(2 * its_slots * stride);
  bytes = aligned(end, kPage);
}

PeerMemory::PeerMemory(const at::Device& device, const PeerLayout& its_layout) : layout(its_layout), device_(device) {
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  auto result = driver.memory_allocate(&base_, layout.bytes);
  if (result != 0) { // that of an earlier window may be on its way back
    await_given_back();
    result = driver.memory_allocate(&base_, layout.bytes);
  }
  driver.check(result, "allocate memory of a window");
}

PeerMemory::~PeerMemory() {
  if (base_ != 0) {
    give_back(device_, [base = base_](const Driver& driver) { driver.memory_free(base); });
  }
}

std::string PeerMemory::address() const {
  const auto& driver = Driver::of(device_.type());
  const auto entered = driver.enter(device_);
  Offer offer{{}, layout};
  driver.check(driver.ipc_get_handle(&offer.handle, base_), "share memory of a window");
  std::string bytes(sizeof(offer), '\0');
  std::memcpy(bytes.data(), &offer, sizeof(offer));
  return bytes;
}

ForeignPeerMemory::ForeignPeerMemory(const at::Device& device, const std::string& address) : device_(device) {
  Offer offer{};
  TORCH_CHECK(address.size() == sizeof(offer), "fog: another rank's window memory has an address that cannot be read");
  std::memcpy(static_cast<void*>(&offer), address.data(), sizeof(offer));
  layout_ = offer.layout;
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  driver.check(driver.ipc_open_handle(&base_, offer.handle, kIpcLazyEnablePeerAccess), "map memory of another rank's window");
}

ForeignPeerMemory::~ForeignPeerMemory() {
  if (base_ != 0) {
    give_back(device_, [base = base_](const Driver& driver) { driver.ipc_close_handle(base); });
  }
}

void ForeignPeerMemory::close() {
  const auto& driver = Driver::of(device_.type());
  const auto entered = driver.enter(device_);
  driver.ipc_close_handle(std::exchange(base_, 0));
}

} // namespace fog::cuda

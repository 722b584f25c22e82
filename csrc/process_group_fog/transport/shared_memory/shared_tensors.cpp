#include "transport/shared_memory/shared_tensors.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "core/tensor_lists.hpp"
#include "transport/shared_memory/arena.hpp"

namespace fog {
namespace {

using shared_memory::Arena;

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* arena = Arena::instance();
    void* memory = arena != nullptr && bytes > 0 ? arena->allocate(bytes) : nullptr;
    if (memory == nullptr) {
      return c10::GetCPUAllocator()->allocate(bytes);
    }
    return {memory, memory, &free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    copy_bytes(to, from, bytes);
  }

 private:
  static void free(void* memory) {
    Arena::instance()->free(memory);
  }
};

bool in_arena(const void* data, size_t bytes) {
  const auto* arena = Arena::instance();
  return arena != nullptr && arena->contains(data, bytes);
}

// New memory together with the old memory that it replaces, which others may still read.
struct Moved {
  c10::DataPtr memory;
  c10::DataPtr old;
};

} // namespace

c10::Allocator& shared_allocator() {
  static SharedAllocator allocator;
  return allocator;
}

at::Tensor empty_shared(at::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &shared_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
}

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto flat = empty_shared({total_numel(tensors)}, tensors[0].scalar_type());
  const auto views = views_of(flat, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    views[i].copy_(tensors[i]);
  }
  return flat;
}

void share(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() && tensor.has_storage(), "tensor: got one on device ", tensor.device(),
      "; allowed are dense tensors on the CPU");
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->nbytes() == 0 || is_shared(tensor)) {
    return;
  }
  const size_t bytes = storage->nbytes();
  auto memory = shared_allocator().allocate(bytes);
  if (!in_arena(memory.get(), bytes)) {
    return; // this system cannot share memory, so a move would be useless
  }
  move_storage(tensor, std::move(memory));
}

void move_storage(const at::Tensor& tensor, c10::DataPtr memory) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  copy_bytes(memory.get(), storage->data(), storage->nbytes());
  if (storage->resizable() && !in_arena(storage->data(), storage->nbytes())) {
    storage->set_data_ptr_noswap(std::move(memory));
    return;
  }
  // The old address may still be in use: torch has marked the storage for that, as in tensor.numpy(), or it is shared
  // memory that an operation in flight uses.
  void* data = memory.get();
  auto* moved = new Moved{std::move(memory), {}};
  moved->old =
      storage->set_data_ptr({data, moved, [](void* both) { delete static_cast<Moved*>(both); }, c10::Device(c10::DeviceType::CPU)});
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.has_storage() && tensor.storage().nbytes() > 0 &&
      in_arena(tensor.storage().data(), tensor.storage().nbytes());
}

} // namespace fog

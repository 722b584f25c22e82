#include "windows/window_pool.hpp"

#include <algorithm>
#include <new>

#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "engine/engine.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/window.hpp"
#include "windows/window_service.hpp"

namespace fog {
namespace {

// A tensor's memory in the pool. Only the process's engine has a pool, so the pool lives as long as the process.
struct Pooled {
  mpi::RemoteMemory& pool;
  void* memory;
};

void free_pooled(void* context) {
  const auto* pooled = static_cast<Pooled*>(context);
  pooled->pool.free(pooled->memory);
  delete pooled;
}

} // namespace

mpi::RemoteMemory* one_sided(const Group& group, int rank) {
  return group.engine.with_lock([&] {
    auto& transport = group.engine.transport();
    const auto peer = group.members[rank].peer_id;
    return transport.shares_memory(peer) ? nullptr : transport.one_sided(peer);
  });
}

void* WindowPool::take(size_t bytes) {
  auto* memory = full_ ? nullptr : pool_.allocate(bytes);
  full_ = memory == nullptr;
  if (!full_) {
    blocks_.push_back(memory);
  }
  return memory;
}

std::unique_ptr<WindowPool> WindowPool::create(const WindowConfig& config, const at::Tensor& tensor) {
  const auto& group = *config.group;
  mpi::RemoteMemory* memory = nullptr;
  const auto reaches = [&](int rank) {
    auto* its = one_sided(group, rank);
    memory = its != nullptr ? its : memory; // the same pool for all ranks
    return its != nullptr;
  };
  const bool is_got = std::count_if(config.out_neighbors.begin(), config.out_neighbors.end(), reaches) > 0;
  std::vector<bool> writers;
  std::transform(config.in_neighbors.begin(), config.in_neighbors.end(), std::back_inserter(writers), reaches);
  if (memory == nullptr) {
    return nullptr;
  }
  const auto& storage = tensor.storage();
  const bool is_there = storage.nbytes() == 0 || memory->address_of(storage.data(), storage.nbytes());
  const bool moves = is_got && !is_there && !WindowService::of(group).has_window_of(storage);

  const size_t peers = all_neighbors(config.in_neighbors, config.out_neighbors).size();
  const size_t label_bytes = WindowMemory::bytes_of(writers.size(), peers);
  const MailboxLayout layout{tensor.nbytes()};
  auto pool = std::unique_ptr<WindowPool>(new WindowPool(*memory));
  auto* new_memory = moves ? pool->take(storage.nbytes()) : nullptr;
  pool->label_ = pool->take(label_bytes);
  for (const bool writes : writers) {
    auto* mailbox = writes ? pool->take(layout.bytes()) : nullptr;
    pool->mailboxes_.push_back(mailbox != nullptr ? new (mailbox) Mailbox() : nullptr);
  }
  if (pool->full_) {
    const size_t mailboxes = std::count(writers.begin(), writers.end(), true);
    LOG(WARNING) << "fog: creation of window '" << config.name << "' of group '" << group.name << "' on rank " << group.rank << ": its "
                 << (moves ? storage.nbytes() : 0) + label_bytes + mailboxes * layout.bytes()
                 << " bytes for neighbors that reach this rank by RMA are more than is left of FOG_RMA_BYTES; these use messages";
    return nullptr;
  }
  if (moves) {
    pool->blocks_.erase(pool->blocks_.begin()); // belongs to the tensor from now on
    move_storage(tensor, {new_memory, new Pooled{*memory, new_memory}, &free_pooled, c10::Device(c10::DeviceType::CPU)});
  }
  return pool;
}

WindowPool::~WindowPool() {
  for (auto* block : blocks_) {
    pool_.free(block);
  }
}

PoolAddresses WindowPool::addresses(const WindowLabel& label) const {
  PoolAddresses addresses;
  const auto find = [&](const void* memory, size_t bytes) { return pool_.address_of(memory, bytes).value_or(PoolAddresses::kNowhere); };
  addresses.changes = find(&label.changes, sizeof(label.changes));
  addresses.tensor = label.bytes == 0 ? 0 : find(reinterpret_cast<const void*>(label.tensor), label.bytes);
  const MailboxLayout layout{label.bytes};
  for (const auto* mailbox : mailboxes_) {
    addresses.mailboxes.push_back(mailbox == nullptr ? PoolAddresses::kNowhere : find(mailbox, layout.bytes()));
  }
  return addresses;
}

} // namespace fog

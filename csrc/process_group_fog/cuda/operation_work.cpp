#include "cuda/operation_work.hpp"

#include <algorithm>
#include <utility>

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

namespace fog::cuda {
namespace {

constexpr size_t kCells = 512; // that are allocated at once

// A storage that is on a device and has no memory there.
c10::weak_intrusive_ptr<c10::StorageImpl> nowhere(const at::Device& device) {
  static auto* mutex = new std::mutex;
  static auto* storages = new std::vector<c10::Storage>;
  const std::lock_guard<std::mutex> lock(*mutex);
  auto found = std::find_if(storages->begin(), storages->end(), [&](const auto& storage) { return storage.device() == device; });
  if (found == storages->end()) {
    found = storages->emplace(found, c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device));
  }
  return found->getWeakStorageImpl();
}

} // namespace

volatile uint64_t* HostCells::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (unused_.empty()) {
    blocks_.push_back(std::make_unique<MappedMemory>(device_, kCells * sizeof(uint64_t)));
    for (size_t i = 0; i < kCells; ++i) {
      unused_.push_back(blocks_.back()->as<uint64_t>() + i);
    }
  }
  auto* cell = unused_.back();
  unused_.pop_back();
  *cell = 0;
  return cell;
}

void HostCells::give_back(volatile uint64_t* cell) {
  const std::lock_guard<std::mutex> lock(mutex_);
  unused_.push_back(cell);
}

Outcome::Outcome(std::shared_ptr<HostCells> its_cells, std::function<std::exception_ptr(int)> its_failure)
    : cells(std::move(its_cells)), cell(cells->take()), failure(std::move(its_failure)) {}

Outcome::~Outcome() {
  if (is_known_to_have_happened(end)) {
    cells->give_back(cell);
  } else { // the device may yet write there
    static_cast<void>(new std::shared_ptr<HostCells>(cells));
  }
}

std::exception_ptr Outcome::error() {
  if (!has_happened(end) || *word() == 0) {
    return nullptr;
  }
  heard = true;
  return failure(*word());
}

// Without a title: the operation's range in a trace has ended by now.
OperationWork::OperationWork(
    int rank, const at::Device& device, std::vector<at::Tensor> tensors, std::shared_ptr<Outcome> outcome, std::exception_ptr error)
    : c10d::Work(rank, c10d::OpType::UNKNOWN), tensors_(std::move(tensors)), outcome_(std::move(outcome)), error_(std::move(error)) {
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<at::Device>{device});
  if (error_) {
    future_->setError(error_);
    return;
  }
  // It remembers the current stream, on which the operation is, for devices of storages: so it gets one in any case, of no memory.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages{nowhere(device)};
  for (const auto& tensor : tensors_) {
    if (is_allocated_by_torch(tensor)) { // as for use_on()
      storages.emplace_back(tensor.storage().getWeakStorageImpl());
    }
  }
  future_->markCompleted(c10::IValue(tensors_), std::move(storages));
}

bool OperationWork::isCompleted() {
  return !outcome_ || has_happened(outcome_->end);
}

bool OperationWork::isSuccess() const {
  return exception() == nullptr && (!outcome_ || has_happened(outcome_->end));
}

std::exception_ptr OperationWork::exception() const {
  return outcome_ ? outcome_->error() : error_;
}

std::vector<at::Tensor> OperationWork::result() {
  return tensors_;
}

void OperationWork::synchronize() {
  if (outcome_) {
    order_after(outcome_->end);
  }
}

bool OperationWork::wait(std::chrono::milliseconds /*timeout*/) {
  if (const auto failure = exception()) {
    std::rethrow_exception(failure);
  }
  synchronize();
  return true;
}

// The base's blocks the stream until the Future is completed, which it is at once.
void OperationWork::blockCurrentStream() {
  synchronize();
}

c10::intrusive_ptr<c10::ivalue::Future> OperationWork::getFuture() {
  return future_;
}

} // namespace fog::cuda

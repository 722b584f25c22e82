#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "core/failure.hpp"
#include "windows/window_legs.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Copies of a neighbor's tensor that its update() may spoil before this rank takes the mutex, which makes the neighbor
// wait.
constexpr int kTries = 2;

} // namespace

std::unique_ptr<Window::Leg> Window::MappedLeg::create(Window& window, Neighbor& neighbor, const WindowDescription& there) {
  const auto& group = window.group_;
  if (there.address.empty() || !group->engine.shares_memory(group, neighbor.rank)) {
    return nullptr;
  }
  const auto its_neighbors = all_neighbors(there.in, there.out);
  auto view = WindowView::attach(there.address, window.bytes(), there.in.size(), its_neighbors.size());
  if (!view) {
    return nullptr;
  }
  return std::unique_ptr<Leg>(
      new MappedLeg(window, neighbor, std::move(view), index_of(its_neighbors, group->rank), index_of(there.in, group->rank)));
}

RankMutex::Other Window::MappedLeg::mutex() {
  return window_.word_of(control_.mutex, PairMutex::Side::kSecond, neighbor_);
}

void Window::MappedLeg::leave() {
  control_.mutex.unlock(PairMutex::Side::kSecond);
  view_->leave(place_);
}

bool Window::MappedLeg::execute(Part& part) {
  switch (part.op) {
    case WindowOp::kGet:
      fetch(part.weight, part.deadline);
      return true;
    case WindowOp::kWrite:
      copy_bytes(view_->tensor() + part.offset, part.data.const_data_ptr(), part.data.nbytes());
      return true;
    case WindowOp::kSignal:
      control_.signal();
      return true;
    default:
      std::optional<EncodedValues> encoded;
      if (part.codec) {
        try {
          window_.check_agreed(name_of(part.op), view_->label(), neighbor_.rank, part.codec->text());
        } catch (const c10::ValueError& error) { // as a message would report it
          window_.fail(name_of(part.op), c10::str("rank ", neighbor_.rank, " reports: ", message_of(error)));
        }
        encoded.emplace(window_.encoded(part.codec, part.data));
      }
      const std::lock_guard<std::mutex> writing(neighbor_.writing);
      window_.values_.write(*view_, slot_, part.op, part.weight, part.p, {part.data.const_data_ptr(), encoded ? &*encoded : nullptr});
      return true;
  }
}

void Window::MappedLeg::fetch(double weight, Deadline deadline) {
  auto& changes = view_->label().changes;
  window_.replace_slot(neighbor_, [&](void* out) {
    // Copies the tensor. Returns whether the copy is consistent: no update() was in progress, or its process has ended.
    const auto copy = [&](bool ended) {
      const auto before = changes.load(std::memory_order_acquire);
      window_.values_.scale(out, view_->tensor(), weight);
      std::atomic_thread_fence(std::memory_order_acquire); // pairs with the fence in change_tensor()
      return ended || (before % 2 == 0 && changes.load(std::memory_order_relaxed) == before);
    };
    bool whole = false;
    for (int tries = 0; tries < kTries && !whole && changes.load(std::memory_order_acquire) % 2 == 0; ++tries) {
      whole = copy(false);
    }
    while (!whole) { // wait for the update's end; the owner does not wait forever in turn, see change_tensor()
      if (Clock::now() >= deadline || !window_.acquire(control_.tensor, PairMutex::Side::kSecond, neighbor_, deadline)) {
        window_.fail("win_get", c10::str("timed out waiting for rank ", neighbor_.rank, " to end its update"));
      }
      whole = copy(neighbor_.ended);
      control_.tensor.unlock(PairMutex::Side::kSecond);
      if (!whole && neighbor_.lost) { // it may stand still within its update
        window_.fail("win_get", window_.why_gone(neighbor_));
      }
    }
    return true;
  });
}

} // namespace fog

#include "cuda/releases.hpp"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <utility>

#include "engine/engine.hpp"

namespace fog::cuda {
namespace {

// What is to be given back, by one thread after the other: windows come to their end by the hundred.
struct Releases {
  std::mutex mutex;
  std::condition_variable idle;
  std::deque<std::function<void()>> queue;
  bool running = false;
};

Releases& releases() {
  static auto* all = new Releases; // the process's end needs no order
  return *all;
}

void run_releases() {
  auto& all = releases();
  std::unique_lock<std::mutex> lock(all.mutex);
  while (!all.queue.empty()) {
    const auto release = std::move(all.queue.front());
    all.queue.pop_front();
    lock.unlock();
    release();
    lock.lock();
  }
  all.running = false;
  all.idle.notify_all();
}

} // namespace

void give_back(const at::Device& device, std::function<void(const Driver&)> release) {
  auto& engine = Engine::instance();
  if (engine.forked()) { // it is the parent's
    return;
  }
  auto& all = releases();
  std::unique_lock<std::mutex> lock(all.mutex);
  all.queue.emplace_back([device, release = std::move(release)] {
    try {
      const auto& driver = Driver::of(device.type());
      const auto entered = driver.enter(device);
      release(driver);
    } catch (const std::exception&) { // the driver has ended with the process
    }
  });
  if (!std::exchange(all.running, true)) {
    lock.unlock();
    engine.run_callbacks(run_releases);
  }
}

void await_given_back() {
  auto& all = releases();
  std::unique_lock<std::mutex> lock(all.mutex);
  all.idle.wait(lock, [&] { return !all.running; });
}

} // namespace fog::cuda

#include "windows/remote_leg.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/window_pool.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Bytes in flight before a flush: enough to keep a network busy, but few enough that the engine's lock is not held for
// long.
constexpr size_t kMostUnflushed = 4 * mpi::RemoteMemory::kMostBytes;
// Copies of a neighbor's tensor that its update() may spoil before this rank requests the tensor by a message.
constexpr int kTries = 3;
// A reader gets this time, plus a nanosecond per byte.
constexpr auto kReaderPatience = std::chrono::milliseconds(100);
// After a failure of the part, its started transfers get this time to end.
constexpr auto kLastFlush = std::chrono::seconds(1);
constexpr auto kLookInterval = std::chrono::microseconds(20);

} // namespace

// The transfers between this process and the neighbor for one part of a call. Between two chunks, the engine's lock is
// released and the part's deadline is checked. The memory of this process that is transferred must stay until it is
// flushed, which happens in any case; small data and copies are kept here for that.
class Window::RemoteLeg::Transfer {
 public:
  Transfer(RemoteLeg& leg, const Part& part) : leg_(leg), part_(part) {}
  ~Transfer() {
    if (unflushed_ > 0) { // after an error
      try {
        auto& engine = leg_.window_.group_->engine;
        engine.with_lock([&] {
          engine.watchdog().expect(std::max(part_.deadline, Clock::now() + kLastFlush));
          leg_.memory_.flush(leg_.peer_);
        });
      } catch (const std::exception&) { // no transfers are in progress then
      }
    }
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void put(Address to, const void* data, size_t bytes) {
    in_chunks(bytes, [&](size_t from, size_t count) {
      leg_.memory_.put(leg_.peer_, to + from, static_cast<const char*>(data) + from, count);
    });
  }
  void get(Address from, void* data, size_t bytes) {
    in_chunks(bytes, [&](size_t begin, size_t count) {
      leg_.memory_.get(leg_.peer_, from + begin, static_cast<char*>(data) + begin, count);
    });
  }
  void flush() {
    if (unflushed_ > 0) {
      with_lock([this] { flush_now(); });
    }
  }
  void notify(Address to, uint64_t number) {
    with_lock([&] { leg_.memory_.notify(leg_.peer_, to, number); });
  }

  PutHeader header = {};
  uint64_t number = 0;
  c10::DataPtr copy;

 private:
  template <typename Move>
  void in_chunks(size_t bytes, Move&& move) {
    for (size_t done = 0; done < bytes;) {
      const size_t count = std::min(mpi::RemoteMemory::kMostBytes, bytes - done);
      with_lock([&] {
        unflushed_ += count; // even if move() fails
        move(done, count);
        if (unflushed_ >= kMostUnflushed) {
          flush_now();
        }
      });
      done += count;
      if (unflushed_ == 0 && done < bytes) {
        std::this_thread::yield(); // other threads may wait for the lock
      }
    }
  }
  void flush_now() {
    leg_.memory_.flush(leg_.peer_);
    unflushed_ = 0;
  }

  template <typename Act>
  void with_lock(Act&& act) {
    auto& window = leg_.window_;
    const auto& group = *window.group_;
    const int rank = leg_.neighbor_.rank;
    const char* op = name_of(part_.op);
    for (bool done = false; !done;) {
      window.check_abandoned(op);
      if (Clock::now() >= part_.deadline) {
        window.fail(op, c10::str("timed out: its timeout of ", part_.timeout.count(), " ms is over; rank ", rank, " was not done yet"));
      }
      std::optional<std::string> how; // set if the neighbor has gone
      std::string what; // set after any other error
      try {
        group.engine.with_lock([&] {
          group.engine.watchdog().expect(part_.deadline); // with the lock, because other threads set it too
          const auto gone = group.gone.find(rank);
          if (gone != group.gone.end()) {
            how = gone->second;
          } else if (leg_.memory_.may_reach(leg_.peer_)) {
            act();
            done = true;
          }
        });
      } catch (const Unreachable& error) {
        // the engine tells the window once it has noticed the failure and knows whether the process has ended
        how = error.what();
      } catch (const c10::DistBackendError& error) {
        what = message_of(error);
      }
      if (how) {
        unflushed_ = 0; // nothing may be sent to it any more, not even a flush
        window.fail(op, group.describe_member(rank) + ' ' + *how);
      }
      if (!what.empty()) {
        window.fail(op, c10::str("rank ", rank, " was not reached: ", what));
      }
      if (!done) {
        std::this_thread::sleep_for(kLookInterval);
      }
    }
  }

  RemoteLeg& leg_;
  const Part& part_;
  size_t unflushed_ = 0; // bytes
};

Window::RemoteLeg::RemoteLeg(Window& window, Neighbor& neighbor, mpi::RemoteMemory& memory, const PoolAddresses& there, Address mailbox)
    : DirectLeg(window, neighbor),
      memory_(memory),
      peer_(window.group_->members[neighbor.rank].peer_id),
      there_(there),
      mailbox_(mailbox),
      layout_{window.bytes()},
      messages_(window, neighbor) {}

std::unique_ptr<Window::Leg> Window::RemoteLeg::create(Window& window, Neighbor& neighbor, const WindowDescription& there) {
  const auto& group = *window.group_;
  auto* memory = one_sided(group, neighbor.rank);
  if (memory == nullptr || there.pool.changes == PoolAddresses::kNowhere) {
    return nullptr;
  }
  auto mailbox = PoolAddresses::kNowhere;
  if (neighbor.out) {
    mailbox = there.pool.mailboxes[index_of(there.in, group.rank)];
    if (mailbox == PoolAddresses::kNowhere) {
      return nullptr;
    }
  }
  return std::unique_ptr<Leg>(new RemoteLeg(window, neighbor, *memory, there.pool, mailbox));
}

void Window::RemoteLeg::leave() {
  if (!left_.exchange(true)) {
    messages_.leave();
  }
}

void Window::RemoteLeg::on_closing() {
  // Waits for a running put, which ends because the window is closed; no new one can begin.
  const std::lock_guard<std::mutex> writing(neighbor_.writing);
  leave();
}

bool Window::RemoteLeg::execute(Part& part) {
  if (part.op == WindowOp::kPut) {
    put(part);
    return true;
  }
  if (part.op == WindowOp::kGet && ahead_ == 0 && there_.tensor != PoolAddresses::kNowhere && get(part)) {
    return true;
  }
  send(part);
  return false;
}

void Window::RemoteLeg::send(Part& part) {
  part.puts = puts_;
  if (part.op != WindowOp::kGet && part.op != WindowOp::kWrite) {
    messages_.start(std::move(part));
    return;
  }
  ++ahead_;
  try {
    messages_.start(std::move(part), [this] { --ahead_; });
  } catch (...) {
    --ahead_;
    throw;
  }
}

void Window::RemoteLeg::put(const Part& part) {
  const std::lock_guard<std::mutex> writing(neighbor_.writing);
  Transfer transfer(*this, part);
  const Address version = mailbox_ + offsetof(Mailbox, version);
  // publish the last put first: otherwise the owner might still read the buffer that this put overwrites
  if (!published_) {
    transfer.notify(version, puts_);
    published_ = true;
  }
  if (starves_ != 0) {
    let_read(transfer, part.deadline);
  }
  const uint64_t number = puts_ + 1;
  auto& header = transfer.header;
  header = {number, part.p ? number : p_number_, part.p.value_or(p_)};
  write(transfer, mailbox_ + layout_.value(number), part.data.const_data_ptr(), part.weight);
  transfer.put(mailbox_ + layout_.header(number), &header, sizeof(header));
  transfer.get(mailbox_ + offsetof(Mailbox, starves), &starves_, sizeof(starves_));
  transfer.flush();
  published_ = false;
  puts_ = number;
  p_number_ = header.p_number;
  p_ = header.p;
  transfer.notify(version, number);
  published_ = true;
}

void Window::RemoteLeg::write(Transfer& transfer, Address to, const void* data, double weight) const {
  const auto& values = window_.values_;
  if (weight == 1) {
    transfer.put(to, data, values.bytes);
    return;
  }
  const size_t item = c10::elementSize(values.dtype);
  transfer.copy = shared_allocator().allocate(std::min(values.bytes, mpi::RemoteMemory::kMostBytes));
  auto* scaled = transfer.copy.get();
  for (size_t done = 0; done < values.bytes;) {
    const size_t count = std::min(mpi::RemoteMemory::kMostBytes, values.bytes - done);
    SlotValues{values.dtype, count / item, count}.scale(scaled, static_cast<const char*>(data) + done, weight);
    transfer.put(to + done, scaled, count);
    transfer.flush();
    done += count;
  }
}

void Window::RemoteLeg::let_read(Transfer& transfer, Deadline deadline) {
  const auto limit = std::min(deadline, Clock::now() + kReaderPatience + std::chrono::nanoseconds(layout_.value_bytes));
  while (true) {
    transfer.get(mailbox_ + offsetof(Mailbox, starves), &starves_, sizeof(starves_));
    transfer.flush();
    if (starves_ == 0 || Clock::now() >= limit) { // a stopped reader notices afterwards that it has to read again
      return;
    }
    std::this_thread::sleep_for(kLookInterval);
  }
}

bool Window::RemoteLeg::get(const Part& part) {
  const auto& values = window_.values_;
  return window_.replace_slot(neighbor_, [&](void* out) {
    Transfer transfer(*this, part);
    const auto changes = [&] {
      transfer.get(there_.changes, &transfer.number, sizeof(transfer.number));
      transfer.flush();
      return transfer.number;
    };
    for (int tries = 0; tries < kTries; ++tries) {
      const auto before = changes();
      if (before % 2 != 0) {
        continue;
      }
      transfer.get(there_.tensor, out, values.bytes);
      transfer.flush();
      if (changes() == before) {
        if (part.weight != 1) {
          values.scale(out, out, part.weight);
        }
        return true;
      }
    }
    return false;
  });
}

} // namespace fog

#include "job/rendezvous.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/deadline.hpp"
#include "core/failure.hpp"

namespace fog {
namespace {

std::string rank_key(const std::string& key, int rank) {
  return key + "/" + std::to_string(rank);
}

// The part that a rank appends to a common value: its rank, the number of bytes that follow, and the bytes.
std::string framed(int rank, const std::string& value) {
  const std::array<uint64_t, 2> head{static_cast<uint64_t>(rank), value.size()};
  return std::string(reinterpret_cast<const char*>(head.data()), sizeof(head)) + value;
}

std::vector<std::pair<int, std::string>> split(const std::string& all, int size) {
  std::vector<std::pair<int, std::string>> parts;
  std::array<uint64_t, 2> head{};
  for (size_t at = 0; at < all.size(); at += sizeof(head) + head[1]) {
    const size_t left = all.size() - at;
    std::memcpy(head.data(), all.data() + at, std::min(left, sizeof(head)));
    TORCH_CHECK_WITH(
        DistBackendError, left >= sizeof(head) && head[1] <= left - sizeof(head) && head[0] < static_cast<uint64_t>(size),
        "fog: what ranks told the Store is damaged at byte ", at, " of ", all.size());
    parts.emplace_back(static_cast<int>(head[0]), all.substr(at + sizeof(head), head[1]));
  }
  return parts;
}

c10::intrusive_ptr<c10d::Store> innermost(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore() : store;
}

// Lists the lowest ranks by number, and how many more there are.
std::string listed(const std::vector<int>& ranks) {
  constexpr size_t kNamed = 20;
  std::string text;
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i) {
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() <= kNamed ? text : text + " and " + std::to_string(ranks.size() - kNamed) + " more";
}

} // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout, Gone gone)
    : store_(std::move(store)),
      appends_(store_->hasExtendedApi()),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      gone_(std::move(gone)),
      prefix_("fog/" + std::to_string(store_->add("fog/rendezvous/" + std::to_string(rank), 1)) + "/") {}

std::string host_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(innermost(store).get());
  return tcp != nullptr ? tcp->getHost() : std::string();
}

bool is_file(const c10::intrusive_ptr<c10d::Store>& store) {
  return dynamic_cast<const c10d::FileStore*>(innermost(store).get()) != nullptr;
}

void Rendezvous::set(const std::string& key, const std::string& value) {
  store_->set(prefix_ + key, value);
}

bool Rendezvous::has(const std::string& key) {
  return store_->check({prefix_ + key});
}

void Rendezvous::finish() {
  try {
    if (store_->add(prefix_ + "finished", 1) < size_) {
      return;
    }
    exchanged_.emplace_back("finished");
    for (const auto& key : exchanged_) {
      store_->deleteKey(prefix_ + key);
    }
  } catch (const std::exception&) { // the store cannot delete keys, or is gone and needs no cleaning
  }
}

std::string Rendezvous::get(const std::string& key) {
  const auto value = store_->get(prefix_ + key);
  return {value.begin(), value.end()};
}

void Rendezvous::wait(const std::string& key, const std::vector<std::string>& keys, const Missing& missing) {
  std::vector<std::string> prefixed;
  prefixed.reserve(keys.size());
  for (const auto& each : keys) {
    prefixed.push_back(prefix_ + each);
  }
  std::string reason;
  try {
    if (!gone_) {
      store_->wait(prefixed, for_torch(timeout_));
    } else if (!wait_for_living(key, prefixed, missing)) {
      reason = "the time is over";
    }
  } catch (const c10::DistBackendError&) { // a rank is gone
    throw;
  } catch (const std::exception& error) {
    reason = error.what();
  }
  if (reason.empty()) {
    return;
  }
  std::string names;
  try {
    names = listed(missing());
  } catch (const std::exception&) { // the store itself is gone, as the first error says
  }
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "fog: rank ", rank_, " of ", size_, " waited for ", timeout_.count(), " ms at the step '", key, "' of setting up the group",
          names.empty() ? "" : "; not there: rank(s) " + names, ". The store said: ", reason));
}

// Asks the store again and again, because a wait in it that ends without a result prints warnings of torch.
bool Rendezvous::wait_for_living(const std::string& key, const std::vector<std::string>& keys, const Missing& missing) {
  using Clock = std::chrono::steady_clock;
  // The store serves all ranks: more of them ask less often.
  const auto shortest = std::chrono::microseconds(100 + 20 * size_);
  const auto longest = std::chrono::microseconds(10'000 + 200 * size_);
  const auto between_looks = std::chrono::milliseconds(200 + 4 * size_);
  const auto began = Clock::now();
  const auto deadline = deadline_after(timeout_);
  auto next_look = began + between_looks;
  while (!store_->check(keys)) {
    const auto now = Clock::now();
    if (now >= next_look) {
      // A lost rank may have come to the step before. What it had told the store is there once its end is known.
      const auto gone = gone_(missing());
      const auto absent = missing();
      if (absent.empty()) { // the last one was lost before it could say that all are there
        return true;
      }
      for (const auto& [rank, name] : gone) {
        if (std::find(absent.begin(), absent.end(), rank) != absent.end()) {
          C10_THROW_ERROR(
              DistBackendError,
              c10::str(
                  "fog: rank ", rank_, " of ", size_, " waited at the step '", key, "' of setting up the group for its rank ", rank,
                  ", which will not come: ", name, " is lost or has ended"));
        }
      }
      next_look = Clock::now() + between_looks;
    }
    if (now >= deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::clamp<Clock::duration>((now - began) / 2, shortest, longest));
  }
  return true;
}

void Rendezvous::put(const std::string& key, const std::string& value) {
  if (appends_) {
    exchanged_.push_back(key + "/all");
    const auto mine = framed(rank_, value);
    store_->append(prefix_ + exchanged_.back(), std::vector<uint8_t>(mine.begin(), mine.end()));
    return;
  }
  for (int rank = 0; rank < size_; ++rank) {
    exchanged_.push_back(rank_key(key, rank));
  }
  set(rank_key(key, rank_), value);
}

std::vector<std::pair<int, std::string>> Rendezvous::there(const std::string& key) {
  if (appends_) {
    return has(key + "/all") ? split(get(key + "/all"), size_) : std::vector<std::pair<int, std::string>>();
  }
  std::vector<std::pair<int, std::string>> values;
  for (int rank = 0; rank < size_; ++rank) {
    if (has(rank_key(key, rank))) {
      values.emplace_back(rank, get(rank_key(key, rank)));
    }
  }
  return values;
}

void Rendezvous::note(const std::string& key) {
  put(key, "1"); // some stores reject an empty value
}

std::string Rendezvous::not_noted(const std::string& key) {
  return listed(missing(key));
}

std::vector<int> Rendezvous::missing(const std::string& key) {
  std::vector<bool> known(static_cast<size_t>(size_));
  for (const auto& [rank, text] : there(key)) {
    known.at(static_cast<size_t>(rank)) = true;
  }
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (!known[static_cast<size_t>(rank)]) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::vector<std::string> Rendezvous::allgather(const std::string& key, const std::string& value) {
  put(key, value);
  std::vector<std::string> awaited;
  if (appends_) {
    const auto count = key + "/count";
    const auto complete = key + "/complete";
    exchanged_.insert(exchanged_.end(), {count, complete});
    if (store_->add(prefix_ + count, 1) == size_) {
      set(complete, "1");
    }
    awaited.push_back(complete);
  } else {
    for (int rank = 0; rank < size_; ++rank) {
      awaited.push_back(rank_key(key, rank));
    }
  }
  wait(key, awaited, [&] { return missing(key); });
  std::vector<std::string> values(static_cast<size_t>(size_));
  for (auto& [rank, text] : appends_ ? split(get(key + "/all"), size_) : there(key)) {
    values.at(static_cast<size_t>(rank)) = std::move(text);
  }
  return values;
}

std::string Rendezvous::from_rank_zero(const std::string& key, const std::function<std::string()>& make) {
  const auto zero = rank_key(key, 0);
  exchanged_.push_back(zero);
  if (rank_ == 0) {
    auto value = make();
    set(zero, value);
    return value;
  }
  wait(key, {zero}, [&] { return has(zero) ? std::vector<int>() : std::vector<int>{0}; });
  return get(zero);
}

std::string Rendezvous::first_failure(const std::string& key, const std::function<void()>& act) {
  std::string failure;
  try {
    act();
  } catch (const std::exception& error) {
    failure = message_of(error);
    failure.erase(0, failure.compare(0, 5, "fog: ") == 0 ? 5 : 0); // of the text that the caller makes
  }
  const auto all = allgather(key, ' ' + failure); // some stores reject an empty value
  const auto first = std::find_if(all.begin(), all.end(), [](const std::string& each) { return each.size() > 1; });
  return first == all.end() ? "" : first->substr(1);
}

} // namespace fog

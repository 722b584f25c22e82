#include "job/rendezvous.hpp"

#include <exception>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "core/deadline.hpp"

namespace fog {
namespace {

std::string rank_key(const std::string& key, int rank) {
  return key + "/" + std::to_string(rank);
}

} // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
    : store_(std::move(store)),
      rank_(rank),
      size_(size),
      timeout_(timeout),
      prefix_("fog/" + std::to_string(store_->add("fog/rendezvous/" + std::to_string(rank), 1)) + "/") {}

Rendezvous::Rendezvous(const Rendezvous& other, c10::intrusive_ptr<c10d::Store> store)
    : store_(std::move(store)), rank_(other.rank_), size_(other.size_), timeout_(other.timeout_), prefix_(other.prefix_) {}

std::unique_ptr<Rendezvous> Rendezvous::clone() const {
  auto store = store_;
  try {
    if (auto copy = store_->clone()) {
      store = copy;
    }
  } catch (const std::exception&) {
  }
  return std::unique_ptr<Rendezvous>(new Rendezvous(*this, std::move(store)));
}

std::string Rendezvous::store_host() const {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get());
  const auto store = prefixed != nullptr ? prefixed->getUnderlyingNonPrefixStore() : store_;
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(store.get());
  return tcp != nullptr ? tcp->getHost() : std::string();
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
  } catch (const std::exception&) { // it cannot delete; or it has gone, and nobody needs it
  }
}

std::string Rendezvous::get(const std::string& key) {
  const auto value = store_->get(prefix_ + key);
  return {value.begin(), value.end()};
}

void Rendezvous::wait(const std::string& key, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (const int rank : ranks) {
    keys.push_back(prefix_ + rank_key(key, rank));
  }
  try {
    store_->wait(keys, for_torch(timeout_));
  } catch (const std::exception& error) {
    std::string missing;
    try {
      for (const int rank : ranks) {
        if (!has(rank_key(key, rank))) {
          missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
        }
      }
    } catch (const std::exception&) { // the store itself is gone; the first error says so
    }
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "fog: rank ", rank_, " of ", size_, " waited for ", timeout_.count(), " ms at the step '", key, "' of setting up the group",
            missing.empty() ? "" : "; not there: rank(s) " + missing, ". The store said: ", error.what()));
  }
}

std::vector<std::string> Rendezvous::allgather(const std::string& key, const std::string& value) {
  set(rank_key(key, rank_), value);
  std::vector<int> everyone;
  everyone.reserve(size_);
  for (int rank = 0; rank < size_; ++rank) {
    everyone.push_back(rank);
  }
  wait(key, everyone);
  for (const int rank : everyone) {
    exchanged_.push_back(rank_key(key, rank));
  }
  std::vector<std::string> values;
  values.reserve(size_);
  for (int rank = 0; rank < size_; ++rank) {
    values.push_back(rank == rank_ ? value : get(rank_key(key, rank)));
  }
  return values;
}

std::string Rendezvous::from_rank_zero(const std::string& key, const std::function<std::string()>& make) {
  exchanged_.push_back(rank_key(key, 0));
  if (rank_ == 0) {
    auto value = make();
    set(rank_key(key, 0), value);
    return value;
  }
  wait(key, {0});
  return get(rank_key(key, 0));
}

void Rendezvous::barrier(const std::string& key) {
  // One key a rank rather than a counter, so that a time-out can name who is missing.
  allgather(key, "1");
}

} // namespace fog

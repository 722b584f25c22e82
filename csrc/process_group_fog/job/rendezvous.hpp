// Exchanges over a c10d Store in which every rank of a group takes part.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fog {

// Returns the host of a store that is reached by TCP, otherwise an empty string.
std::string host_of(const c10::intrusive_ptr<c10d::Store>& store);
// Whether a store is a file, which other users can read, and in which deleted values stay.
bool is_file(const c10::intrusive_ptr<c10d::Store>& store);

// Each rank's access to one group's Store. All waits are bounded by `timeout`, and errors name the missing ranks.
//
// The same store may serve several groups in turn (init_process_group after destroy_process_group), so each rank counts
// its rendezvous in the store, and each rendezvous has its own keys.
class Rendezvous {
 public:
  // Returns how those of these ranks are called that are known to be gone, so that nobody waits for them.
  using Gone = std::function<std::map<int, std::string>(const std::vector<int>& ranks)>;

  // `gone`: null if nothing is known about the ranks.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout, Gone gone = nullptr);

  // Returns every rank's value under `key`, in rank order. A rank makes at most five requests, for any number of ranks,
  // or one request per rank if the store cannot append. With `gone`, it also asks from time to time whether all have come.
  std::vector<std::string> allgather(const std::string& key, const std::string& value);

  // Returns rank 0's value under `key`; `make` makes it on rank 0.
  std::string from_rank_zero(const std::string& key, const std::function<std::string()>& make);

  // Returns once every rank has run its act(): what the first failure among them says, the same on all ranks, or an empty
  // text.
  std::string first_failure(const std::string& key, const std::function<void()>& act);

  // note() records that this rank has come to this step. not_noted() lists the ranks that have not, for an error; "" if
  // all have.
  void note(const std::string& key);
  std::string not_noted(const std::string& key);

  // Says that this rank no longer needs the exchanged values. Once all ranks have said so, they are deleted if the
  // store supports it.
  void finish();

  // Deletes the value at this key too. All ranks must name the same key.
  void discard(const std::string& key) {
    exchanged_.push_back(key);
  }

  void set(const std::string& key, const std::string& value);
  bool has(const std::string& key);
  std::string get(const std::string& key);

  std::string store_host() const {
    return host_of(store_);
  }
  bool is_in_file() const {
    return is_file(store_);
  }

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }

 private:
  // put() adds this rank's value under `key`; there() returns the values that have arrived.
  void put(const std::string& key, const std::string& value);
  std::vector<std::pair<int, std::string>> there(const std::string& key);
  // Returns the ranks that have not come to the step `key`.
  std::vector<int> missing(const std::string& key);
  // Waits for `keys`, which the step `key` needs. `missing` lists the ranks that have not come to the step; if there
  // are none, nothing is waited for.
  using Missing = std::function<std::vector<int>()>;
  void wait(const std::string& key, const std::vector<std::string>& keys, const Missing& missing);
  // Does so while it looks for ranks that are gone. Returns false at the timeout.
  bool wait_for_living(const std::string& key, const std::vector<std::string>& keys, const Missing& missing);

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool appends_; // the store can append to a value
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const Gone gone_;
  const std::string prefix_;
  std::vector<std::string> exchanged_; // keys, the same on every rank
};

} // namespace fog

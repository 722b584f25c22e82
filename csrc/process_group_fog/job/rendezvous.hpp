// Exchanges over a c10d Store in which every rank of a group takes part.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fog {

// Every rank's view of one group's Store. All waiting is bounded by `timeout`, and an error names the ranks that did not
// come.
//
// The same store may serve several groups one after the other (init_process_group after destroy_process_group does that),
// so every rank counts its rendezvous there, and each has keys of its own.
class Rendezvous {
 public:
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout);

  // Every rank's value under `key`, in rank order. A rank makes five requests at most, however many ranks there are, or one for each rank
  // where the store cannot append.
  std::vector<std::string> allgather(const std::string& key, const std::string& value);

  // Rank 0's value under `key`, made by `make` there.
  std::string from_rank_zero(const std::string& key, const std::function<std::string()>& make);

  // Returns once every rank has called it with this key.
  void barrier(const std::string& key);

  // This rank has come so far; and which ranks have not said so, for an error: "" if all have.
  void note(const std::string& key);
  std::string not_noted(const std::string& key);

  // This rank needs nothing of it any more. Once all have said so, what was exchanged is deleted, where the store can do that.
  void finish();

  // What is at that key, which all ranks name here, is deleted as well.
  void discard(const std::string& key) {
    exchanged_.push_back(key);
  }

  void set(const std::string& key, const std::string& value);
  bool has(const std::string& key);
  std::string get(const std::string& key);

  // Where the store is, if it is reached by TCP; else empty.
  std::string store_host() const;

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }

 private:
  // Adds this rank's value to those under `key`; which there are.
  void put(const std::string& key, const std::string& value);
  std::vector<std::pair<int, std::string>> there(const std::string& key);
  // Waits for keys without which the step `key` does not go on; `missing` says which ranks have not come to it, for the error.
  void wait(const std::string& key, const std::vector<std::string>& keys, const std::function<std::string()>& missing);

  const c10::intrusive_ptr<c10d::Store> store_;
  const bool appends_; // the store can add to a value
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const std::string prefix_;
  std::vector<std::string> exchanged_; // keys, the same on every rank
};

} // namespace fog

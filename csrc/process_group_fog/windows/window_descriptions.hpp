// The descriptions that the ranks of a group exchange when they create a window together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// "float32[3, 4]"
std::string layout_of(const at::Tensor& tensor);

// Addresses in a rank's pool that its neighbors need for one-sided operations on its window.
struct PoolAddresses {
  static constexpr uint64_t kNowhere = ~uint64_t(0);

  uint64_t changes = kNowhere; // WindowLabel::changes
  uint64_t tensor = kNowhere;
  std::vector<uint64_t> mailboxes; // by in-neighbor; empty if there are none
};

struct WindowDescription {
  std::string name;
  std::string layout; // "float32[3, 4]"
  std::string address; // of its memory, for ranks of its host
  PoolAddresses pool;
  std::vector<int> in;
  std::vector<int> out;
  uint64_t number = 0; // the first number that no window of the group has had on this rank
  std::string error; // why this rank cannot create the window; empty if it can
};

std::string encode(const WindowDescription& description);

// Decodes the descriptions of `size` ranks, one after the other.
std::vector<WindowDescription> decode_descriptions(const std::string& all, int size);

// Throws ValueError, with the same text on every rank, unless the ranks agree.
void check_agreement(const std::vector<WindowDescription>& ranks);

// "rank 1", "ranks 0, 2"
std::string list_ranks(const std::vector<int>& ranks);

// In- and out-neighbors, ascending.
std::vector<int> all_neighbors(const std::vector<int>& in, const std::vector<int>& out);

bool contains(const std::vector<int>& ranks, int rank);
// The index of a rank in a list; the list's length if it is not there.
size_t index_of(const std::vector<int>& ranks, int rank);

} // namespace fog

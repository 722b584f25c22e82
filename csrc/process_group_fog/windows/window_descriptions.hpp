// What the ranks of a group say of the window that they are about to make together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "transport/one_sided.hpp"

namespace fog {

// "float32[3, 4]"
std::string layout_of(const at::Tensor& tensor);

// Where neighbors that reach a rank's pool find what they need of its window there.
struct PoolAddresses {
  static constexpr OneSided::Address kNowhere = ~OneSided::Address(0);

  OneSided::Address changes = kNowhere; // WindowLabel::changes
  OneSided::Address tensor = kNowhere;
  std::vector<OneSided::Address> mailboxes; // by in-neighbor; empty if there are none
};

struct WindowDescription {
  std::string name;
  std::string layout; // "float32[3, 4]"
  std::string address; // of its memory, for ranks of its host
  PoolAddresses pool;
  std::vector<int> in;
  std::vector<int> out;
  uint64_t number = 0; // the first that no window of the group has had on this rank
  std::string error; // why this rank cannot make the window; empty if it can
};

std::string encode(const WindowDescription& description);

// Those of `size` ranks, one after the other.
std::vector<WindowDescription> decode_descriptions(const std::string& all, int size);

// Throws ValueError, with the same text on every rank, unless they agree.
void check_agreement(const std::vector<WindowDescription>& ranks);

// "rank 1", "ranks 0, 2"
std::string list_ranks(const std::vector<int>& ranks);

// In- and out-neighbors, ascending.
std::vector<int> all_neighbors(const std::vector<int>& in, const std::vector<int>& out);

bool contains(const std::vector<int>& ranks, int rank);
// The place of a rank in a list; the list's length if it is not there.
size_t index_of(const std::vector<int>& ranks, int rank);

} // namespace fog

#include "windows/window_descriptions.hpp"

#include <algorithm>
#include <iomanip>
#include <set>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/names.hpp"

namespace fog {

std::string layout_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), tensor.sizes());
}

std::string encode(const WindowDescription& rank) {
  std::ostringstream text;
  for (const auto* field : {&rank.name, &rank.layout, &rank.address, &rank.error}) {
    text << std::quoted(*field) << ' ';
  }
  for (const auto* list : {&rank.in, &rank.out}) {
    text << list->size() << ' ';
    for (const int entry : *list) {
      text << entry << ' ';
    }
  }
  text << rank.number << ' ' << rank.pool.changes << ' ' << rank.pool.tensor << ' ' << rank.pool.mailboxes.size() << ' ';
  for (const auto address : rank.pool.mailboxes) {
    text << address << ' ';
  }
  return text.str();
}

std::vector<WindowDescription> decode_descriptions(const std::string& all, int size) {
  std::istringstream text(all);
  std::vector<WindowDescription> descriptions(static_cast<size_t>(size));
  for (auto& rank : descriptions) {
    for (auto* field : {&rank.name, &rank.layout, &rank.address, &rank.error}) {
      text >> std::quoted(*field);
    }
    for (auto* list : {&rank.in, &rank.out}) {
      size_t length = 0;
      text >> length;
      list->resize(text && length <= all.size() ? length : 0);
      for (int& entry : *list) {
        text >> entry;
      }
    }
    size_t mailboxes = 0;
    text >> rank.number >> rank.pool.changes >> rank.pool.tensor >> mailboxes;
    rank.pool.mailboxes.resize(text && mailboxes <= all.size() ? mailboxes : 0);
    for (auto& address : rank.pool.mailboxes) {
      text >> address;
    }
  }
  TORCH_INTERNAL_ASSERT(!text.fail(), "fog: Window: the ranks' descriptions of the window cannot be read");
  return descriptions;
}

void check_agreement(const std::vector<WindowDescription>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    TORCH_CHECK_VALUE(ranks[rank].error.empty(), "Window: rank ", rank, " reports: ", ranks[rank].error);
  }
  const auto& first = ranks.front();
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const auto& other = ranks[rank];
    const auto differ = [&](const char* what, const std::string& one, const std::string& two) {
      TORCH_CHECK_VALUE(
          one == two, "Window: ranks disagree on the ", what, " of the window: rank 0 has ", one, ", rank ", rank, " has ", two);
    };
    differ("name", "'" + first.name + "'", "'" + other.name + "'");
    differ("tensor", first.layout, other.layout);
  }
  for (size_t writer = 0; writer < ranks.size(); ++writer) {
    for (size_t owner = 0; owner < ranks.size(); ++owner) {
      const bool sends = contains(ranks[writer].out, static_cast<int>(owner));
      const bool receives = contains(ranks[owner].in, static_cast<int>(writer));
      TORCH_CHECK_VALUE(
          sends == receives, "Window: ranks disagree on the neighbors of window '", first.name, "': rank ", owner, " is ",
          sends ? "" : "not ", "among the out_neighbors of rank ", writer, ", but rank ", writer, " is ", receives ? "" : "not ",
          "among the in_neighbors of rank ", owner);
    }
  }
}

std::string list_ranks(const std::vector<int>& ranks) {
  return ranks.empty() ? "no rank" : (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

std::vector<int> all_neighbors(const std::vector<int>& in, const std::vector<int>& out) {
  std::set<int> all(in.begin(), in.end());
  all.insert(out.begin(), out.end());
  return {all.begin(), all.end()};
}

bool contains(const std::vector<int>& ranks, int rank) {
  return index_of(ranks, rank) < ranks.size();
}

size_t index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

} // namespace fog

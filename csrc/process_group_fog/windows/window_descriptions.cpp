#include "windows/window_descriptions.hpp"

#include <algorithm>
#include <set>
#include <sstream>

#include <c10/util/Exception.h>

#include "core/names.hpp"

namespace fog {
namespace {

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

} // namespace

std::string layout_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), tensor.sizes());
}

std::string encode(const WindowDescription& rank) {
  std::ostringstream text;
  const auto put = [&text](const std::string& field) { text << field.size() << ' ' << field; };
  const auto put_list = [&text](const std::vector<int>& list) {
    text << list.size() << ' ';
    for (const int entry : list) {
      text << entry << ' ';
    }
  };
  put(rank.name);
  put(rank.layout);
  put(rank.address);
  put(rank.error);
  put_list(rank.in);
  put_list(rank.out);
  text << rank.number << ' ';
  return text.str();
}

std::vector<WindowDescription> decode_descriptions(const std::string& all, int size) {
  std::istringstream text(all);
  const auto take = [&text] {
    size_t length = 0;
    text >> length;
    text.get();
    std::string field(length, '\0');
    text.read(field.data(), static_cast<std::streamsize>(length));
    return field;
  };
  const auto take_list = [&text] {
    size_t length = 0;
    text >> length;
    std::vector<int> list(length);
    for (int& entry : list) {
      text >> entry;
    }
    return list;
  };
  std::vector<WindowDescription> descriptions;
  for (int rank = 0; rank < size; ++rank) {
    WindowDescription next;
    next.name = take();
    next.layout = take();
    next.address = take();
    next.error = take();
    next.in = take_list();
    next.out = take_list();
    text >> next.number;
    text.get();
    descriptions.push_back(std::move(next));
  }
  TORCH_INTERNAL_ASSERT(text.good(), "fog: win_create: what the ranks say of the window cannot be read");
  return descriptions;
}

void check_agreement(const std::vector<WindowDescription>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    TORCH_CHECK_VALUE(ranks[rank].error.empty(), "win_create: rank ", rank, " reports: ", ranks[rank].error);
  }
  const auto& first = ranks.front();
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const auto& other = ranks[rank];
    const auto differ = [&](const char* what, const std::string& one, const std::string& two) {
      TORCH_CHECK_VALUE(
          one == two, "win_create: ranks disagree on the ", what, " of the window: rank 0 has ", one, ", rank ", rank, " has ", two);
    };
    differ("name", "'" + first.name + "'", "'" + other.name + "'");
    differ("tensor", first.layout, other.layout);
  }
  for (size_t writer = 0; writer < ranks.size(); ++writer) {
    for (size_t owner = 0; owner < ranks.size(); ++owner) {
      const bool sends = contains(ranks[writer].out, static_cast<int>(owner));
      const bool receives = contains(ranks[owner].in, static_cast<int>(writer));
      TORCH_CHECK_VALUE(
          sends == receives, "win_create: ranks disagree on the neighbors of window '", first.name, "': rank ", owner, " is ",
          sends ? "" : "not ", "among the out_neighbors of rank ", writer, ", but rank ", writer, " is ", receives ? "" : "not ",
          "among the in_neighbors of rank ", owner);
    }
  }
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return ranks.empty() ? "no rank" : text;
}

std::vector<int> all_neighbors(const std::vector<int>& in, const std::vector<int>& out) {
  std::set<int> all(in.begin(), in.end());
  all.insert(out.begin(), out.end());
  return {all.begin(), all.end()};
}

size_t index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

} // namespace fog

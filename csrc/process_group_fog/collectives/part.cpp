#include "collectives/part.hpp"

#include <cstring>

#include <c10/util/Exception.h>

#include "transport/block.hpp"

namespace fog {

void copy_own(const Part& from, const Part& to) {
  TORCH_CHECK_VALUE(from.bytes == to.bytes, "this rank sends itself ", from.bytes, " bytes, but expects ", to.bytes);
  if (from.data == to.data) {
    return;
  }
  const auto* source = static_cast<const char*>(from.data);
  const auto* target = static_cast<const char*>(to.data);
  if (source < target + to.bytes && target < source + from.bytes) {
    std::memmove(to.data, from.data, from.bytes);
  } else {
    copy_result(to.data, from.data, from.bytes);
  }
}

} // namespace fog

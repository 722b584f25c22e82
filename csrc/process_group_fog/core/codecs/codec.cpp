#include "core/codecs/codec.hpp"

#include <c10/util/Exception.h>

#include "core/names.hpp"

namespace fog {

void Codec::check(const char* op, c10::ScalarType dtype) const {
  switch (dtype) {
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return;
    default:
      TORCH_CHECK_VALUE(
          false, op, ": compression: got ", text(), " for dtype ", dtype_name(dtype),
          "; it allows float16, bfloat16, float32 and float64");
  }
}

} // namespace fog

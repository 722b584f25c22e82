// All codecs, by name. Each has a file of its own, which describes its form, its error, and what becomes of NaN.
#pragma once

#include <memory>
#include <string>

#include "core/codecs/codec.hpp"

namespace fog {

using CodecPtr = std::shared_ptr<const Codec>;

// Each function throws ValueError, naming the argument, for an argument that is not allowed.
namespace codecs {

CodecPtr float16();
CodecPtr bfloat16();

CodecPtr int8(int64_t block);

// Of `numel` elements, `k` are sent, or the given fraction if `k` is 0: at least one. `bits` are 2, or 32 for values as
// they are.
CodecPtr top_k(double fraction, int64_t k, int bits);

} // namespace codecs
} // namespace fog

// Loops that are compiled twice: for AVX2, and for the instructions that every CPU of the architecture has.
//
// A loop is a struct with a static function run() that is marked FOG_LOOP, as is everything that it calls. It is plain
// C++ that the compiler turns into vector instructions. Both versions apply the same operations to an element, and sums
// have a fixed order, so both give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/instruction_set.hpp"

#define FOG_LOOP inline __attribute__((always_inline))

namespace fog::codecs {

FOG_LOOP uint32_t bits_of(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FOG_LOOP float float_of(uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns `a` if the condition holds, otherwise `b`. Both are computed: for a plain choice the compiler would compute a
// sum of floats in a branch, as it may raise a flag of the CPU, and loops with branches do not become vectors.
FOG_LOOP uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0U - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

template <typename Loop, typename... Arguments>
void run_portable(Arguments... arguments) {
  Loop::run(arguments...);
}

#ifdef __x86_64__
template <typename Loop, typename... Arguments>
__attribute__((target("avx2,f16c"))) void run_avx2(Arguments... arguments) {
  Loop::run(arguments...);
}
#endif

template <typename Loop, typename... Arguments>
void run(Arguments... arguments) {
#ifdef __x86_64__
  if (has_avx2()) {
    return run_avx2<Loop>(arguments...);
  }
#endif
  run_portable<Loop>(arguments...);
}

} // namespace fog::codecs

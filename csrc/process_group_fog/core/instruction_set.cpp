#include "core/instruction_set.hpp"

#include <string>

#include <ATen/Version.h>

namespace fog {
namespace {

bool find_avx2() {
#ifdef __x86_64__
  const std::string capability = at::get_cpu_capability();
  return (capability == "AVX2" || capability == "AVX512") && __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

} // namespace

bool has_avx2() {
  static const bool found = find_avx2();
  return found;
}

} // namespace fog

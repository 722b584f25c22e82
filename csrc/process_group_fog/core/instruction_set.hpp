// The vector instructions that fog's loops use.
#pragma once

namespace fog {

// Returns whether the loops that are compiled for AVX2 and F16C run, and not those for every CPU of the architecture.
// It follows torch's choice for its own kernels, so ATEN_CPU_CAPABILITY=default has an effect.
bool has_avx2();

} // namespace fog

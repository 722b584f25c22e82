// The loops behind arithmetic.hpp. Their vectors have FOG_VECTOR_BYTES, for the instruction set in FOG_TARGET.
//
// arithmetic.cpp includes this file once for each instruction set, each time with its own namespace FOG_ISA. The
// functions that handle a vector carry FOG_TARGET, and no other code in the program does, so a CPU without the
// instructions never executes them. Every instruction set applies the same operations to an element in the same order,
// so all give the same bits, with one exception: if two NaN meet, the CPU decides which payload remains.

#define FOG_INLINE FOG_TARGET inline __attribute__((always_inline))

namespace fog {
namespace {
namespace FOG_ISA {

template <typename T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

// One register of elements of type A.
template <typename A>
using Vector = typename VectorOf<A, FOG_VECTOR_BYTES>::type;

using Floats = Vector<float>;
using Doubles = Vector<double>;
using Words = Vector<uint32_t>;

template <typename A>
constexpr size_t kLanes = FOG_VECTOR_BYTES / sizeof(A);

// Two registers: the smallest unit that is loaded at once. load() and store() define which elements each register
// holds.
template <typename A>
struct Pair {
  Vector<A> part[2];
};

template <typename A>
constexpr size_t kPairLanes = 2 * kLanes<A>;

template <typename V>
FOG_INLINE V load_vector(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename V>
FOG_INLINE void store_vector(void* to, V value) {
  std::memcpy(to, &value, sizeof(value));
}

// The values are float in memory and double in registers. Compilers generate slow code for __builtin_convertvector() on
// x86.

FOG_INLINE Doubles load_as_double(const float* from) {
#if defined(FOG_AVX2)
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(from));
#elif defined(__x86_64__)
  return (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load_vector<VectorOf<float, FOG_VECTOR_BYTES / 2>::type>(from), Doubles);
#endif
}

FOG_INLINE void store_as_float(float* to, Doubles value) {
#if defined(FOG_AVX2)
  _mm_storeu_ps(to, _mm256_cvtpd_ps((__m256d)value));
#elif defined(__x86_64__)
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_castps_si128(_mm_cvtpd_ps((__m128d)value)));
#else
  store_vector(to, __builtin_convertvector(value, VectorOf<float, FOG_VECTOR_BYTES / 2>::type));
#endif
}

// The values are 16-bit floats in memory and float in registers. Loading is exact; storing rounds to nearest even. A
// NaN becomes the quiet NaN of c10::BFloat16, which has no sign, or of c10::Half, which keeps the sign. A 32-bit word
// holds two elements. The low halves go to one register and the high halves to the other, so no shuffles are needed.

// Leaves the result in the high half of each word; the low half is arbitrary.
FOG_INLINE Words round_to_bfloat16(Floats value) {
  const Words bits = (Words)value;
  const Words rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return value != value ? Words{} + 0x7FC00000 : rounded;
}

FOG_INLINE Pair<float> load_bfloat16(const void* from) {
  const Words words = load_vector<Words>(from);
  return {{(Floats)(words << 16), (Floats)(words & 0xFFFF0000)}};
}

FOG_INLINE void store_bfloat16(void* to, const Pair<float>& value) {
  store_vector(to, (round_to_bfloat16(value.part[0]) >> 16) | (round_to_bfloat16(value.part[1]) & 0xFFFF0000));
}

#ifdef FOG_AVX2

FOG_INLINE Pair<float> load_float16(const void* from) {
  const auto* halves = static_cast<const __m128i*>(from);
  return {{(Floats)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (Floats)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
}

FOG_INLINE void store_float16(void* to, const Pair<float>& value) {
  for (int i = 0; i < 2; ++i) {
    // The instruction keeps the first bits of NaN's payload: clear them. load_float16() has set the quiet bit already.
    const Words bits = (Words)value.part[i];
    const Words payload = (Words)(value.part[i] != value.part[i]) & 0x003FFFFF;
    const __m128i halves = _mm256_cvtps_ph((__m256)(bits & ~payload), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(static_cast<__m128i*>(to) + i, halves);
  }
}

#else

FOG_INLINE Pair<float> load_float16(const void* from) {
  const auto* halves = static_cast<const uint16_t*>(from);
  Pair<float> value{};
  for (size_t i = 0; i < kPairLanes<float>; ++i) {
    value.part[i / kLanes<float>][i % kLanes<float>] = c10::detail::fp16_ieee_to_fp32_value(halves[i]);
  }
  return value;
}

FOG_INLINE void store_float16(void* to, const Pair<float>& value) {
  auto* halves = static_cast<uint16_t*>(to);
  for (size_t i = 0; i < kPairLanes<float>; ++i) {
    halves[i] = c10::detail::fp16_ieee_from_fp32_value(value.part[i / kLanes<float>][i % kLanes<float>]);
  }
}

#endif

template <typename T, typename A>
FOG_INLINE Pair<A> load(const T* from) {
  if constexpr (std::is_same_v<T, c10::Half>) {
    return load_float16(from);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return load_bfloat16(from);
  } else if constexpr (std::is_same_v<T, A>) {
    return {{load_vector<Vector<A>>(from), load_vector<Vector<A>>(from + kLanes<A>)}};
  } else {
    return {{load_as_double(from), load_as_double(from + kLanes<A>)}};
  }
}

template <typename T, typename A>
FOG_INLINE void store(T* to, const Pair<A>& value) {
  if constexpr (std::is_same_v<T, c10::Half>) {
    store_float16(to, value);
  } else if constexpr (std::is_same_v<T, c10::BFloat16>) {
    store_bfloat16(to, value);
  } else if constexpr (std::is_same_v<T, A>) {
    store_vector(to, value.part[0]);
    store_vector(to + kLanes<A>, value.part[1]);
  } else {
    store_as_float(to, value.part[0]);
    store_as_float(to + kLanes<A>, value.part[1]);
  }
}

// Functors for the steps of a reduction: prepare an input, combine two running values, finish the result.

struct Keep {
  template <typename V>
  FOG_INLINE V operator()(V value) const {
    return value;
  }
  template <typename V>
  FOG_INLINE V operator()(size_t, V value) const {
    return value;
  }
};

template <typename A>
struct Scale {
  const double* factors; // one per input

  FOG_INLINE Vector<A> operator()(size_t k, Vector<A> value) const {
    return static_cast<A>(factors[k]) * value;
  }
};

template <typename A>
struct Divide {
  A divisor;

  FOG_INLINE Vector<A> operator()(Vector<A> value) const {
    return value / divisor;
  }
};

// Divides sums of T, which are added as unsigned numbers, and truncates like C. CPUs have no vector instruction for
// this, and the divisor may not fit into T.
template <typename T>
struct DivideWhole {
  using Unsigned = std::make_unsigned_t<T>;
  using Wide = std::conditional_t<
      (sizeof(T) > 4),
      std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
      std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>;
  Wide divisor;

  FOG_INLINE Vector<Unsigned> operator()(Vector<Unsigned> value) const {
    for (size_t lane = 0; lane < kLanes<Unsigned>; ++lane) {
      value[lane] = static_cast<Unsigned>(static_cast<Wide>(static_cast<T>(value[lane])) / divisor);
    }
    return value;
  }
};

struct Sum {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return a + b;
  }
};

struct Product {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return a * b;
  }
};

// Propagates NaN: takes `a` if it is NaN, and takes `b` if it is NaN because every comparison with it is false.
struct Minimum {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return (a != a) | (a < b) ? a : b;
  }
};

struct Maximum {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return (a != a) | (a > b) ? a : b;
  }
};

struct And {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return a & b;
  }
};

struct Or {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return a | b;
  }
};

struct Xor {
  template <typename V>
  FOG_INLINE V operator()(V a, V b) const {
    return a ^ b;
  }
};

template <typename A, typename Prepare>
FOG_INLINE Pair<A> prepare_pair(Prepare prepare, size_t k, const Pair<A>& value) {
  return {{prepare(k, value.part[0]), prepare(k, value.part[1])}};
}

template <typename A, typename Combine>
FOG_INLINE Pair<A> combine_pair(Combine combine, const Pair<A>& a, const Pair<A>& b) {
  return {{combine(a.part[0], b.part[0]), combine(a.part[1], b.part[1])}};
}

template <typename A, typename Finish>
FOG_INLINE Pair<A> finish_pair(Finish finish, const Pair<A>& value) {
  return {{finish(value.part[0]), finish(value.part[1])}};
}

// Pairs that are processed at once. More gained nothing on Zen 4 with 2 to 8 inputs: the caches or the conversions are
// the limit.
constexpr size_t kUnrolled = 2;

// Computes out = finish(combine over k of prepare(k, inputs[k])) for kPairs pairs at `offset`. The running results stay
// in registers, and all inputs are read before the result is written, so `out` may be one of them.
template <typename T, typename A, size_t kPairs, typename Prepare, typename Combine, typename Finish>
FOG_INLINE void combine_pairs(
    T* out, const void* const* inputs, size_t count, size_t offset, Prepare prepare, Combine combine, Finish finish) {
  Pair<A> running[kPairs];
  const T* first = static_cast<const T*>(inputs[0]) + offset;
  for (size_t p = 0; p < kPairs; ++p) {
    running[p] = prepare_pair<A>(prepare, 0, load<T, A>(first + p * kPairLanes<A>));
  }
  for (size_t k = 1; k < count; ++k) {
    const T* next = static_cast<const T*>(inputs[k]) + offset;
    for (size_t p = 0; p < kPairs; ++p) {
      running[p] = combine_pair<A>(combine, running[p], prepare_pair<A>(prepare, k, load<T, A>(next + p * kPairLanes<A>)));
    }
  }
  for (size_t p = 0; p < kPairs; ++p) {
    store<T, A>(out + offset + p * kPairLanes<A>, finish_pair<A>(finish, running[p]));
  }
}

// Does the same for the last elements, fewer than a pair, in a zero-padded copy.
template <typename T, typename A, typename Prepare, typename Combine, typename Finish>
FOG_INLINE void combine_rest(
    T* out, const void* const* inputs, size_t count, size_t offset, size_t numel, Prepare prepare, Combine combine, Finish finish) {
  T items[kPairLanes<A>] = {};
  const size_t bytes = (numel - offset) * sizeof(T);
  std::memcpy(items, static_cast<const T*>(inputs[0]) + offset, bytes);
  Pair<A> running = prepare_pair<A>(prepare, 0, load<T, A>(items));
  for (size_t k = 1; k < count; ++k) {
    std::memcpy(items, static_cast<const T*>(inputs[k]) + offset, bytes);
    running = combine_pair<A>(combine, running, prepare_pair<A>(prepare, k, load<T, A>(items)));
  }
  store<T, A>(items, finish_pair<A>(finish, running));
  std::memcpy(out + offset, items, bytes);
}

template <typename T, typename A, typename Prepare, typename Combine, typename Finish>
FOG_TARGET void combine_all(void* out, Inputs inputs, size_t numel, Prepare prepare, Combine combine, Finish finish) {
  T* result = static_cast<T*>(out);
  const void* const* data = inputs.data();
  const size_t count = inputs.size();
  constexpr size_t kStep = kUnrolled * kPairLanes<A>;
  size_t offset = 0;
  for (; offset + kStep <= numel; offset += kStep) {
    combine_pairs<T, A, kUnrolled>(result, data, count, offset, prepare, combine, finish);
  }
  for (; offset + kPairLanes<A> <= numel; offset += kPairLanes<A>) {
    combine_pairs<T, A, 1>(result, data, count, offset, prepare, combine, finish);
  }
  if (offset < numel) {
    combine_rest<T, A>(result, data, count, offset, numel, prepare, combine, finish);
  }
}

template <typename T, typename Combine>
void plain(void* out, Inputs inputs, size_t numel, Combine combine) {
  combine_all<T, Accumulator<T>>(out, inputs, numel, Keep(), combine, Keep());
}

template <typename T, typename A>
void mean(void* out, Inputs inputs, size_t numel, size_t divisor) {
  combine_all<T, A>(out, inputs, numel, Keep(), Sum(), Divide<A>{static_cast<A>(divisor)});
}

template <typename T, typename A>
void scaled_sum(void* out, Inputs inputs, Factors factors, size_t numel) {
  combine_all<T, A>(out, inputs, numel, Scale<A>{factors.data()}, Sum(), Keep());
}

template <typename T>
void reduce_floats(RedOp op, void* out, Inputs inputs, Factors scales, size_t numel, size_t divisor) {
  switch (op) {
    case RedOp::SUM:
      return plain<T>(out, inputs, numel, Sum());
    case RedOp::PRODUCT:
      return plain<T>(out, inputs, numel, Product());
    case RedOp::AVG:
      return mean<T, Accumulator<T>>(out, inputs, numel, divisor);
    case RedOp::PREMUL_SUM:
      return scaled_sum<T, Accumulator<T>>(out, inputs, scales, numel);
    case RedOp::MIN:
      return plain<T>(out, inputs, numel, Minimum());
    case RedOp::MAX:
      return plain<T>(out, inputs, numel, Maximum());
    default:
      no_kernel(op);
  }
}

// Also used for bool, which is one byte with the value 0 or 1.
void reduce_bits(RedOp op, void* out, Inputs inputs, size_t bytes) {
  switch (op) {
    case RedOp::BAND:
      return plain<uint8_t>(out, inputs, bytes, And());
    case RedOp::BOR:
      return plain<uint8_t>(out, inputs, bytes, Or());
    case RedOp::BXOR:
      return plain<uint8_t>(out, inputs, bytes, Xor());
    default:
      no_kernel(op);
  }
}

template <typename T>
void reduce_integers(RedOp op, void* out, Inputs inputs, size_t numel, size_t divisor) {
  using Unsigned = std::make_unsigned_t<T>; // wraps around, to the same bits as a signed number
  switch (op) {
    case RedOp::SUM:
      return plain<Unsigned>(out, inputs, numel, Sum());
    case RedOp::AVG: {
      const DivideWhole<T> divide{static_cast<typename DivideWhole<T>::Wide>(divisor)};
      return combine_all<Unsigned, Unsigned>(out, inputs, numel, Keep(), Sum(), divide);
    }
    case RedOp::PRODUCT:
      return plain<Unsigned>(out, inputs, numel, Product());
    case RedOp::MIN:
      return plain<T>(out, inputs, numel, Minimum());
    case RedOp::MAX:
      return plain<T>(out, inputs, numel, Maximum());
    default:
      return reduce_bits(op, out, inputs, numel * sizeof(T));
  }
}

// Implements fog::reduce() for all dtypes except bool and complex.
void reduce(RedOp op, c10::ScalarType dtype, void* out, Inputs inputs, Factors scales, size_t numel, size_t divisor) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return reduce_floats<c10::Half>(op, out, inputs, scales, numel, divisor);
    case c10::ScalarType::BFloat16:
      return reduce_floats<c10::BFloat16>(op, out, inputs, scales, numel, divisor);
    case c10::ScalarType::Float:
      return reduce_floats<float>(op, out, inputs, scales, numel, divisor);
    case c10::ScalarType::Double:
      return reduce_floats<double>(op, out, inputs, scales, numel, divisor);
    default:
      AT_DISPATCH_V2(
          dtype, "reduce", AT_WRAP([&] { reduce_integers<scalar_t>(op, out, inputs, numel, divisor); }),
          AT_EXPAND(AT_INTEGRAL_TYPES_V2));
  }
}

template <typename T, typename A>
void weighted(void* out, Inputs inputs, Factors weights, bool take_mean, size_t numel) {
  if (take_mean) {
    return mean<T, A>(out, inputs, numel, inputs.size());
  }
  scaled_sum<T, A>(out, inputs, weights, numel);
}

// Implements fog::weighted_sum() for all dtypes except complex.
void weighted_sum(c10::ScalarType dtype, void* out, Inputs inputs, Factors weights, bool mean, size_t numel) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return weighted<c10::Half, float>(out, inputs, weights, mean, numel);
    case c10::ScalarType::BFloat16:
      return weighted<c10::BFloat16, float>(out, inputs, weights, mean, numel);
    case c10::ScalarType::Float:
      return weighted<float, double>(out, inputs, weights, mean, numel);
    case c10::ScalarType::Double:
      return weighted<double, double>(out, inputs, weights, mean, numel);
    default:
      no_kernel(dtype);
  }
}

} // namespace FOG_ISA
} // namespace
} // namespace fog

#undef FOG_INLINE

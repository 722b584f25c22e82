R"cuda(
// fog's kernels, compiled at run time by NVRTC: no header is at hand. All loops are grid-strided, no thread waits for another one of
// its kernel, and float arithmetic is the CPU's, operation by operation (arithmetic_kernels.hpp), so that the bits are.
//
// Tests compile this for the host, where FOG_KERNEL and the built-in names are theirs.

#ifndef FOG_KERNEL
#define FOG_KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
#endif

using Count = unsigned long long;

static __device__ Count first_index() {
  return static_cast<Count>(blockIdx.x) * blockDim.x + threadIdx.x;
}

static __device__ Count index_step() {
  return static_cast<Count>(gridDim.x) * blockDim.x;
}

// A kernel before this one has failed, on which it depends: it does nothing then.
static __device__ bool has_failed(const int* failed) {
  return failed != nullptr && *static_cast<const volatile int*>(failed) != 0;
}

// --- 16-bit floats: exact to float; back, to nearest even, with the CPU's NaN ---

struct Float16 {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

union FloatBits {
  float value;
  unsigned bits;
};

static __device__ float widen(BFloat16 value) {
  FloatBits wide;
  wide.bits = static_cast<unsigned>(value.bits) << 16;
  return wide.value;
}

static __device__ void narrow(float value, BFloat16& result) {
  FloatBits wide;
  wide.value = value;
  const unsigned rounded = wide.bits + 0x7FFF + ((wide.bits >> 16) & 1);
  result.bits = static_cast<unsigned short>(value != value ? 0x7FC0 : rounded >> 16);
}

#ifdef __CUDA_ARCH__

// Of a clock that all devices of the host share, nearly.
[[maybe_unused]] static __device__ Count nanoseconds() {
  Count now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

static __device__ float widen(Float16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

static __device__ void narrow(float value, Float16& result) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  if (value != value) {
    FloatBits wide;
    wide.value = value;
    result.bits = static_cast<unsigned short>(((wide.bits >> 16) & 0x8000) | 0x7E00);
  }
}

#endif

static __device__ double widen(float value) {
  return value;
}

static __device__ void narrow(double value, float& result) {
  result = static_cast<float>(value);
}

static __device__ double widen(double value) {
  return value;
}

static __device__ void narrow(double value, double& result) {
  result = value;
}

// --- weighted sums ---

static __device__ bool lies_in_packs(const void* out, const Rows& rows) {
  Count all = reinterpret_cast<Count>(out);
  for (int k = 0; k < rows.count; ++k) {
    all |= reinterpret_cast<Count>(rows.data[k]);
  }
  return all % 16 == 0;
}

// out[i] = the rows' weighted sum, or mean, of `kLanes` elements from `i` on: in type A, in the rows' order, rounded once. `out` may be
// one of the rows.
template <typename T, typename A, int kLanes>
static __device__ void combine_at(T* out, const Rows& rows, Count i) {
  struct alignas(sizeof(T) * kLanes) Pack {
    T lanes[kLanes];
  };
  A sum[kLanes] = {};
  for (int k = 0; k < rows.count; ++k) {
    const Pack pack = *reinterpret_cast<const Pack*>(static_cast<const T*>(rows.data[k]) + i);
    const A weight = static_cast<A>(rows.weights[k]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const A value = rows.mean ? A(widen(pack.lanes[lane])) : A(weight * A(widen(pack.lanes[lane])));
      sum[lane] = k == 0 ? value : sum[lane] + value;
    }
  }
  Pack result;
  for (int lane = 0; lane < kLanes; ++lane) {
    narrow(rows.count == 0 ? A(0) : rows.mean ? sum[lane] / static_cast<A>(rows.count) : sum[lane], result.lanes[lane]);
  }
  *reinterpret_cast<Pack*>(out + i) = result;
}

template <typename T, typename A>
static __device__ void combine(void* out, const Rows& rows, Count numel, const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  constexpr int kLanes = 16 / sizeof(T);
  const Count packed = lies_in_packs(out, rows) ? numel / kLanes * kLanes : 0;
  for (Count i = first_index() * kLanes; i < packed; i += index_step() * kLanes) {
    combine_at<T, A, kLanes>(static_cast<T*>(out), rows, i);
  }
  for (Count i = packed + first_index(); i < numel; i += index_step()) {
    combine_at<T, A, 1>(static_cast<T*>(out), rows, i);
  }
}

template <typename T>
static __device__ T round_to(double value, double least, double most, T smallest, T largest) {
  if (value != value) {
    return 0;
  }
  const double rounded = rint(value);
  return rounded <= least ? smallest : rounded >= most ? largest : static_cast<T>(rounded);
}

// Integers: exactly, and modulo their range, where all weights are whole numbers; else in double, rounded to even, and clamped.
template <typename T>
static __device__ void combine_integers(void* out, const Rows& rows, Count numel, const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  constexpr bool kSigned = T(-1) < T(0);
  constexpr T kSmallest = kSigned ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0);
  constexpr T kLargest = T(~kSmallest);
  T* result = static_cast<T*>(out);
  for (Count i = first_index(); i < numel; i += index_step()) {
    if (rows.whole) {
      Count sum = 0;
      for (int k = 0; k < rows.count; ++k) {
        sum += static_cast<Count>(static_cast<long long>(rows.weights[k])) * static_cast<Count>(static_cast<const T*>(rows.data[k])[i]);
      }
      result[i] = static_cast<T>(sum);
    } else {
      double sum = 0;
      for (int k = 0; k < rows.count; ++k) {
        sum += rows.weights[k] * static_cast<double>(static_cast<const T*>(rows.data[k])[i]);
      }
      result[i] = round_to<T>(sum, static_cast<double>(kSmallest), static_cast<double>(kLargest), kSmallest, kLargest);
    }
  }
}

// Of rows that are given, and of those that another kernel has found.
#define FOG_COMBINE(type, call) \
  FOG_KERNEL(combine_##type, void* out, Rows rows, Count numel, const int* failed) { call(out, rows, numel, failed); } \
  FOG_KERNEL(sum_##type, const Sum* sum, Count numel, const int* failed) { call(sum->out, sum->rows, numel, failed); }
FOG_COMBINE(float16, (combine<Float16, float>))
FOG_COMBINE(bfloat16, (combine<BFloat16, float>))
FOG_COMBINE(float32, (combine<float, double>))
FOG_COMBINE(float64, (combine<double, double>))
FOG_COMBINE(int8, combine_integers<signed char>)
FOG_COMBINE(int16, combine_integers<short>)
FOG_COMBINE(int32, combine_integers<int>)
FOG_COMBINE(int64, combine_integers<long long>)
FOG_COMBINE(uint8, combine_integers<unsigned char>)
FOG_COMBINE(uint16, combine_integers<unsigned short>)
FOG_COMBINE(uint32, combine_integers<unsigned>)
FOG_COMBINE(uint64, combine_integers<unsigned long long>)
#undef FOG_COMBINE

// --- windows: one thread each ---

// Peterson's lock, which needs no atomic operation ("Myths about the mutual exclusion problem", Information Processing Letters 12,
// 1981, doi:10.1016/0020-0190(81)90106-X). Each fence keeps what is before it before what is after it, for all devices and the host.
// A rank that is gone wants nothing any more, whatever it has left there.
static __device__ bool acquire(PairLock* lock, int side, const volatile int* gone, Count end) {
  lock->wants[side] = 1;
  __threadfence_system();
  lock->turn = 1 - side;
  __threadfence_system();
  while (lock->wants[1 - side] != 0 && lock->turn == 1 - side && *gone == 0) {
    if (nanoseconds() >= end) {
      lock->wants[side] = 0;
      __threadfence_system();
      return false;
    }
    __nanosleep(200);
  }
  __threadfence_system();
  return true;
}

static __device__ PairLock* lock_at(const Locks& locks, int place) {
  return reinterpret_cast<PairLock*>(reinterpret_cast<char*>(locks.first) + locks.stride * static_cast<Count>(place));
}

// The first `count` of them.
static __device__ void release(const Locks& locks, int count) {
  __threadfence_system();
  for (int place = 0; place < count; ++place) {
    lock_at(locks, place)->wants[locks.side] = 0;
  }
  __threadfence_system();
}

// How many it has got; all, or those before the one that it has not got by `end`.
static __device__ int acquire_all(const Locks& locks, Count end) {
  int count = 0;
  while (count < locks.count && acquire(lock_at(locks, count), locks.side, locks.gone + count, end)) {
    ++count;
  }
  return count;
}

static __device__ bool is_whole(double weight) {
  return rint(weight) == weight && weight <= 9007199254740992.0 && weight >= -9007199254740992.0;
}

static __device__ void clear(Sum* sum, void* out) {
  sum->out = out;
  sum->rows.count = 0;
  sum->rows.mean = 0;
  sum->rows.whole = 1;
}

static __device__ void add_row(Sum* sum, const void* data, double weight) {
  sum->rows.data[sum->rows.count] = data;
  sum->rows.weights[sum->rows.count] = weight;
  ++sum->rows.count;
  sum->rows.whole = sum->rows.whole != 0 && is_whole(weight) ? 1 : 0;
}

constexpr Count kSecondBuffer = 1;
constexpr Count kFilled = 2;
constexpr Count kSecondP = 4;
constexpr Count kOneVersion = 8;

// The buffers of a slot lie one after the other, those of the slots too, `stride` bytes apart.
static __device__ char* buffer_of(const WindowSlot* slot, const WindowSlot* first, char* buffers, Count stride, Count which) {
  return buffers + (2 * static_cast<Count>(slot - first) + which) * stride;
}

static __device__ double p_of(const WindowSlot* slot) {
  return slot->p[(slot->state & kSecondP) != 0 ? 1 : 0];
}

// Changes the slot's state to `next`, all at once; `p` is that of the new state.
static __device__ void publish(WindowSlot* slot, Count next, double p) {
  next ^= kSecondP;
  slot->p[(next & kSecondP) != 0 ? 1 : 0] = p;
  __threadfence_system(); // and the value
  slot->state = next;
  __threadfence_system();
}

// The beginning of an operation, whose parts fail by themselves; `any` will be the number of the first that does.
FOG_KERNEL(window_begin, Count* began, int* any) {
  *began = nanoseconds();
  *any = 0;
}

// Takes all locks until `limit` nanoseconds after the beginning, or none: then the part has failed.
FOG_KERNEL(window_lock, Locks one, Locks two, const Count* began, Count limit, int part, int* failed, int* any) {
  *failed = 0;
  const Count end = *began + limit;
  const int first = acquire_all(one, end);
  const int second = first == one.count ? acquire_all(two, end) : 0;
  if (first + second == one.count + two.count) {
    return;
  }
  release(two, second);
  release(one, first);
  *failed = 1;
  if (*any == 0) {
    *any = part;
  }
}

FOG_KERNEL(window_unlock, Locks one, Locks two, const int* failed) {
  if (!has_failed(failed)) {
    release(two, two.count);
    release(one, one.count);
  }
}

// What to write to a slot, in the buffer that nobody looks at: weight * source, or with `adds` the sum of it and what is there.
FOG_KERNEL(
    window_plan_write,
    const WindowSlot* slot,
    const WindowSlot* first,
    char* buffers,
    Count stride,
    const void* source,
    double weight,
    int adds,
    Sum* sum,
    const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  const Count state = slot->state;
  const Count latest = state & kSecondBuffer;
  clear(sum, buffer_of(slot, first, buffers, stride, kSecondBuffer - latest));
  if (adds != 0 && (state & kFilled) != 0) {
    add_row(sum, buffer_of(slot, first, buffers, stride, latest), 1.0);
  }
  if (weight != 0) {
    add_row(sum, source, weight);
  }
}

// That it is written, and p: weight * *p, or with `adds` that and what was there; as it was if `p` is null. Then the locks are free.
FOG_KERNEL(
    window_publish, WindowSlot* slot, int adds, double weight, const double* p, Locks one, Locks two, const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  const double before = p_of(slot);
  const double after = p == nullptr ? before : adds != 0 ? before + weight * *p : weight * *p;
  publish(slot, ((slot->state ^ kSecondBuffer) | kFilled) + (adds != 0 ? 0 : kOneVersion), after);
  release(two, two.count);
  release(one, one.count);
}

// The sum of an update. `neighbors` are slots with their weights.
FOG_KERNEL(
    window_plan_update,
    Rows neighbors,
    const WindowSlot* first,
    char* buffers,
    Count stride,
    const void* tensor,
    double self_weight,
    void* out,
    Sum* sum,
    const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  clear(sum, out);
  if (self_weight != 0) {
    add_row(sum, tensor, self_weight);
  }
  for (int k = 0; k < neighbors.count; ++k) {
    const WindowSlot* slot = static_cast<const WindowSlot*>(neighbors.data[k]);
    const Count state = slot->state;
    if ((state & kFilled) != 0 && neighbors.weights[k] != 0) {
      add_row(sum, buffer_of(slot, first, buffers, stride, state & kSecondBuffer), neighbors.weights[k]);
    }
  }
}

// Its end: p unless it is null; with `takes` the neighbors' slots are empty, and their p unless `p` is null; all versions are 0.
FOG_KERNEL(
    window_finish_update,
    Rows neighbors,
    int takes,
    double self_weight,
    double* p,
    WindowSlot* first,
    int slots,
    Locks one,
    Locks two,
    const int* failed) {
  if (has_failed(failed)) {
    return;
  }
  double sum = 0;
  for (int k = 0; k < neighbors.count; ++k) {
    WindowSlot* slot = static_cast<WindowSlot*>(const_cast<void*>(neighbors.data[k]));
    sum += neighbors.weights[k] * p_of(slot);
    if (takes != 0) {
      publish(slot, slot->state & ~kFilled, p == nullptr ? p_of(slot) : 0.0);
    }
  }
  if (p != nullptr) {
    *p = self_weight * *p + sum;
  }
  for (int k = 0; k < slots; ++k) {
    first[k].state = first[k].state & (kOneVersion - 1);
  }
  release(two, two.count);
  release(one, one.count);
}

FOG_KERNEL(window_set_p, double* p, double value) {
  *p = value;
}

FOG_KERNEL(window_scale_p, double* p, double weight, const int* failed) {
  if (!has_failed(failed)) {
    *p = weight * *p;
  }
}

// Tells the host how an operation has ended, in memory of the host.
FOG_KERNEL(window_report, const int* any, volatile int* outcome) {
  *outcome = *any;
  __threadfence_system();
}

// What was written before is there when the signal is.
FOG_KERNEL(window_signal, WindowDoor* door) {
  __threadfence_system();
  door->sent = door->sent + 1;
  __threadfence_system();
}

// `any` is 1 if there was none until `limit` nanoseconds after the beginning, and 2 if there will be none: the source is gone.
FOG_KERNEL(window_wait_signal, WindowDoor* door, const volatile int* gone, Count limit, int* any) {
  const Count end = nanoseconds() + limit;
  *any = 0;
  while (door->sent == door->taken) {
    const bool is_gone = *gone != 0;
    __threadfence_system();
    if (is_gone && door->sent == door->taken) { // nor did it come meanwhile
      *any = 2;
      return;
    }
    if (nanoseconds() >= end) {
      *any = 1;
      return;
    }
    __nanosleep(200);
  }
  __threadfence_system();
  door->taken = door->taken + 1;
}
)cuda"

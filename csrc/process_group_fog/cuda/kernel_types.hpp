// Types that kernels get as arguments. The kernels are compiled at run time, so they are given this as text as well.
#pragma once

#define FOG_TEXT_OF(...) #__VA_ARGS__
#define FOG_TEXT(...) FOG_TEXT_OF(__VA_ARGS__)

// Rows: inputs of one elementwise sum, with their weights. So many take 2 of the 4 KiB that a kernel's arguments may have; `whole`: all weights are whole numbers.
#define FOG_KERNEL_TYPES               \
  constexpr int kMostRows = 128;       \
  struct Rows {                        \
    const void* data[kMostRows];       \
    double weights[kMostRows];         \
    int count;                         \
    int mean;                          \
    int whole;                         \
  };                                   \
                                       \
  struct Sum {                         \
    void* out;                         \
    Rows rows;                         \
  };                                   \
                                       \
  struct PairLock {                    \
    volatile int wants[2];             \
    volatile int turn;                 \
    int unused;                        \
  };                                   \
                                       \
  struct Locks {                       \
    PairLock* first;                   \
    unsigned long long stride;         \
    int count;                         \
    int side;                          \
    const volatile int* gone;          \
  };                                   \
                                       \
  struct WindowSlot {                  \
    PairLock lock;                     \
    volatile unsigned long long state; \
    volatile double p[2];              \
    unsigned long long unused[3];      \
  };                                   \
                                       \
  struct WindowDoor {                  \
    PairLock tensor;                   \
    volatile unsigned long long sent;  \
    volatile unsigned long long taken; \
    unsigned long long unused[4];      \
  };

// Sum: rows, and where their sum goes, as a kernel has found out on the device.
// PairLock: of two ranks, by loads and stores alone: atomics do not reach over every link between devices.
// Locks: `count` of them, `stride` bytes apart, in one memory; `side` is 0 for the owner of that memory. `gone`: a word of the host's for
// each, not 0 once the process of the rank on the other side has ended.
// WindowSlot: of an in-neighbor, see peer_window.hpp; its value is in one of two buffers. In `state`, from bit 0 on: which buffer; whether
// there is a value, else it counts as zeros; which p; and the version.
// WindowDoor: what else an owner and one of its neighbors share: the lock of the owner's tensor, and signals that came and were taken.
namespace fog::cuda {

FOG_KERNEL_TYPES

} // namespace fog::cuda

// What the engine knows of a window: how to do what ranks of other hosts ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "transport/message.hpp"
#include "windows/pair_mutex.hpp"

namespace fog {

// Ranks are group ranks. The engine serves one source's operations one after the other.
class WindowEndpoint {
 public:
  virtual ~WindowEndpoint() = default;

  virtual size_t bytes() const = 0; // of the tensor
  virtual bool is_neighbor(int rank) const = 0; // no other rank may ask for anything
  // --- without the engine's lock ---
  // kPut or kAccumulate of weight * data, and of p if it comes along, in the slot of `source`.
  virtual void apply(int source, WindowOp op, double weight, std::optional<double> p, const void* data, size_t bytes) = 0;
  // kWrite: into the tensor, from byte `offset` on.
  virtual void write(int source, size_t offset, const void* data, size_t bytes) = 0;
  // Copies the tensor.
  virtual void read(void* out) = 0;
  // The group is closed: no operation may begin.
  virtual void on_group_closed() = 0;
  // --- with it ---
  // That of the pair of this rank and `source`, for which the engine stands as the second side.
  virtual PairMutex& mutex(int source) = 0;
  virtual void on_signal(int source) = 0;
  // `source` has ended its use of this window.
  virtual void on_left(int source) = 0;
  // `peer` takes no further part.
  virtual void on_gone(int peer, const std::string& how) = 0;
};

} // namespace fog

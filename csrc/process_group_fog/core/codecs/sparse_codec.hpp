// The common part of the codecs that send some of the elements, and nothing of the others.
#pragma once

#include <string>

#include "core/codecs/codec.hpp"

namespace fog::codecs {

// Subclasses choose the places. A message has a prefix of fixed size, then the values in the order of their places
// (sparse_values.hpp), and then what is needed to find the places.
class SparseCodec : public Codec {
 public:
  size_t bytes(c10::ScalarType dtype, size_t numel) const final;
  Unit unit(c10::ScalarType dtype) const final;
  void encode(c10::ScalarType dtype, const void* in, size_t numel, const Draw& draw, uint8_t* out, size_t first) const final;
  Places open(c10::ScalarType dtype, size_t numel, const uint8_t* message) const final;
  void decode(c10::ScalarType dtype, size_t numel, const Places& places, const uint8_t* data, size_t first, size_t count, void* out)
      const final;
  void encode_tensor(const at::Tensor& values, const Draw& draw, const at::Tensor& message) const final;
  void decode_tensor(const at::Tensor& message, const at::Tensor& out) const final;

 protected:
  // `k` elements are sent, or the given fraction if it is 0, in `bits` bits each. Throws ValueError.
  SparseCodec(const std::string& name, double fraction, int64_t k, const std::string& more, size_t prefix, int bits);

  // The number of elements that are sent of `numel`: none of none, otherwise at least one.
  size_t count(size_t numel) const;
  // The bytes behind the values.
  virtual size_t tail_bytes(size_t numel) const = 0;
  // Chooses the places for a message, and writes its prefix and its tail.
  virtual Places choose(
      c10::ScalarType dtype, const void* in, size_t numel, const Draw& draw, uint8_t* prefix, uint8_t* tail) const = 0;
  virtual Places read(size_t numel, const uint8_t* prefix, const uint8_t* tail) const = 0;
  // The same by operations of ATen: see encode_tensor(). Places are ascending, of dtype int64.
  virtual at::Tensor choose_places(
      const at::Tensor& values, const Draw& draw, const at::Tensor& prefix, const at::Tensor& tail) const = 0;
  virtual at::Tensor read_places(int64_t numel, const at::Tensor& prefix, const at::Tensor& tail) const = 0;

 private:
  // The three parts of a message.
  struct Parts {
    at::Tensor prefix;
    at::Tensor values;
    at::Tensor tail;
  };
  Parts parts_of(const at::Tensor& message, c10::ScalarType dtype, int64_t numel) const;

  const double fraction_;
  const size_t k_;
  const size_t prefix_;
  const int bits_;
};

} // namespace fog::codecs

// Codecs: forms of a tensor in fewer bytes. This part does not communicate.
//
// A message is a sequence of units, and each unit is the code of some consecutive elements. Units that have arrived can
// be decoded while the rest is on its way. The number of bytes depends on the dtype and the number of elements only.
// Equal arguments give equal bytes on every CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>

namespace fog {

class Codec {
 public:
  virtual ~Codec() = default;

  // The codec with its parameters, as in fogdist.compression: "Int8(block=256)". Ranks compare it.
  const std::string& text() const {
    return text_;
  }
  // Throws ValueError, naming codec and dtype, unless the codec is defined for `dtype`: float16, bfloat16, float32 and
  // float64.
  void check(const char* op, c10::ScalarType dtype) const;

  virtual size_t bytes(c10::ScalarType dtype, size_t numel) const = 0;
  // The elements and bytes of each unit except the last one, which may be shorter; zeros for a codec whose messages are
  // one unit, of any size.
  struct Unit {
    size_t elements;
    size_t bytes;
  };
  virtual Unit unit(c10::ScalarType dtype) const = 0;

  // Encodes `numel` elements. They may be some units of a larger tensor, which are a part of its message.
  virtual void encode(c10::ScalarType dtype, const void* in, size_t numel, uint8_t* out) const = 0;

  // The places of the elements that a message contains, in ascending order. It is empty for a codec that sends all.
  using Places = std::vector<uint64_t>;
  // Reads the places in a whole message. Throws ValueError if the message is not valid.
  virtual Places open(c10::ScalarType dtype, size_t numel, const uint8_t* message) const {
    return {};
  }
  // Writes elements `first` to `first + count` of a message of `numel` elements to `out`. `data` is the unit that
  // begins with the element `first`; if unit() is zeros it is the message, and `places` are what open() has returned.
  virtual void decode(
      c10::ScalarType dtype, size_t numel, const Places& places, const uint8_t* data, size_t first, size_t count, void* out) const = 0;

 protected:
  explicit Codec(std::string text) : text_(std::move(text)) {}

 private:
  const std::string text_;
};

} // namespace fog

#include "core/codecs/places.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

namespace fog::codecs {
namespace {

// The number of bits of each place that Elias's code stores as they are: floor(log2(numel / k)).
int low_bits(size_t numel, size_t k) {
  int bits = 0;
  while ((numel >> (bits + 1)) >= k) {
    ++bits;
  }
  return bits;
}

size_t whole_bytes(size_t bits) {
  return (bits + 7) / 8;
}

void set_bit(uint8_t* bytes, size_t bit) {
  bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | 1U << (bit % 8));
}

// Calls use() with the number of each set bit, in ascending order.
template <typename Use>
void for_bits(const uint8_t* bytes, size_t count, Use use) {
  for (size_t begin = 0; begin < count; begin += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + begin, std::min<size_t>(8, count - begin)); // little-endian, as the ranks of a job are
    for (; word != 0; word &= word - 1) {
      use(begin * 8 + static_cast<size_t>(__builtin_ctzll(word)));
    }
  }
}

// The form of `k` places below `numel`; k is at least 1. In Elias's form place number i sets the bit (place >> bits) + i
// of the unary part.
struct PlacesForm {
  PlacesForm(size_t numel, size_t k)
      : bits(low_bits(numel, k)),
        low(whole_bytes(k * static_cast<size_t>(bits))),
        high(whole_bytes(k + ((numel - 1) >> bits))),
        is_bitmap(whole_bytes(numel) <= low + high) {}

  const int bits; // of each place, that Elias's form stores as they are
  const size_t low; // bytes of these bits, which come first
  const size_t high; // bytes of the unary part
  const bool is_bitmap;
};

} // namespace

size_t places_bytes(size_t numel, size_t k) {
  if (k == 0) {
    return 0;
  }
  const PlacesForm form(numel, k);
  return form.is_bitmap ? whole_bytes(numel) : form.low + form.high;
}

void pack_places(const std::vector<uint64_t>& places, size_t numel, uint8_t* out) {
  const size_t k = places.size();
  if (k == 0) {
    return;
  }
  std::memset(out, 0, places_bytes(numel, k));
  const PlacesForm form(numel, k);
  if (form.is_bitmap) {
    for (const uint64_t place : places) {
      set_bit(out, place);
    }
    return;
  }
  const uint64_t mask = (uint64_t(1) << form.bits) - 1;
  uint64_t pending = 0; // bits that do not fill a byte yet
  int filled = 0;
  uint8_t* low = out;
  for (size_t i = 0; i < k; ++i) {
    pending |= (places[i] & mask) << filled;
    filled += form.bits;
    for (; filled >= 8; filled -= 8, pending >>= 8) {
      *low++ = static_cast<uint8_t>(pending);
    }
    set_bit(out + form.low, (places[i] >> form.bits) + i);
  }
  if (filled > 0) {
    *low = static_cast<uint8_t>(pending);
  }
}

std::vector<uint64_t> unpack_places(const uint8_t* in, size_t numel, size_t k) {
  std::vector<uint64_t> places;
  if (k == 0) {
    return places;
  }
  places.reserve(k);
  size_t found = 0; // set bits, which are more than k only in a message that is not valid
  const auto add = [&](uint64_t place) {
    if (++found <= k) {
      places.push_back(place);
    }
  };
  const PlacesForm form(numel, k);
  if (form.is_bitmap) {
    for_bits(in, whole_bytes(numel), add);
  } else {
    const uint64_t mask = (uint64_t(1) << form.bits) - 1;
    const uint8_t* low = in;
    uint64_t pending = 0;
    int filled = 0;
    for_bits(in + form.low, form.high, [&](size_t bit) {
      if (found >= k) {
        ++found;
        return;
      }
      for (; filled < form.bits; filled += 8) {
        pending |= uint64_t(*low++) << filled;
      }
      add((uint64_t(bit - found) << form.bits) | (pending & mask));
      pending >>= form.bits;
      filled -= form.bits;
    });
  }
  bool valid = found == k && places.back() < numel;
  for (size_t i = 1; valid && i < k; ++i) {
    valid = places[i - 1] < places[i];
  }
  TORCH_CHECK_VALUE(valid, "message: its ", found, " places are not ", k, " ascending ones below ", numel);
  return places;
}

} // namespace fog::codecs

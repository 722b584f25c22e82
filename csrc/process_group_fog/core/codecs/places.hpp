// Packs the places of some elements of a tensor, in ascending order.
//
// The smaller of two forms is used: a bitmap; or the code of P. Elias, "Efficient storage and retrieval by content and
// address of static files", Journal of the ACM 21, 1974. Elias's code stores the lowest bits of each place as they are,
// and the differences of the rest in unary. It takes less than 2 + ceil(log2(numel / k)) bits for each of k places,
// about half a bit more than any code must. The size of both depends on the two numbers only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fog::codecs {

size_t places_bytes(size_t numel, size_t k);

// Writes places_bytes() bytes.
void pack_places(const std::vector<uint64_t>& places, size_t numel, uint8_t* out);

// Throws ValueError unless the bytes are `k` places below `numel`.
std::vector<uint64_t> unpack_places(const uint8_t* in, size_t numel, size_t k);

} // namespace fog::codecs

// HMAC with SHA-256 (RFC 2104, FIPS 180-4): proofs that a process knows a key, which do not show the key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fog {

std::array<uint8_t, 32> hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t bytes);

// Compares proofs in a time that does not depend on the first byte that differs.
bool equal_in_constant_time(const std::array<uint8_t, 32>& a, const std::array<uint8_t, 32>& b);

} // namespace fog

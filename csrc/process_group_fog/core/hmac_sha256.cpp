#include "core/hmac_sha256.hpp"

#include <algorithm>
#include <cstring>

namespace fog {
namespace {

using Digest = std::array<uint8_t, 32>;

constexpr size_t kBlockBytes = 64;
constexpr size_t kRounds = 64;
constexpr size_t kLengthBytes = 8;

__extension__ using Wide = unsigned __int128;

template <size_t count>
constexpr std::array<uint64_t, count> first_primes() {
  std::array<uint64_t, count> primes{};
  size_t found = 0;
  for (uint64_t number = 2; found < count; ++number) {
    bool is_prime = true;
    for (size_t i = 0; i < found; ++i) {
      is_prime = is_prime && number % primes[i] != 0;
    }
    if (is_prime) {
      primes[found++] = number;
    }
  }
  return primes;
}

// Returns the first 32 bits of the fraction of the root of `number`; `power` is 2 or 3. All constants of SHA-256 are
// such numbers.
constexpr uint32_t root_fraction(uint64_t number, int power) {
  const Wide target = Wide(number) << (32 * power);
  uint64_t root = 0;
  for (int bit = 36; bit >= 0; --bit) {
    const uint64_t tried = root | (uint64_t(1) << bit);
    const Wide square = Wide(tried) * tried;
    if ((power == 2 ? square : square * tried) <= target) {
      root = tried;
    }
  }
  return static_cast<uint32_t>(root);
}

template <size_t count>
constexpr std::array<uint32_t, count> root_fractions(int power) {
  std::array<uint32_t, count> fractions{};
  const auto primes = first_primes<count>();
  for (size_t i = 0; i < count; ++i) {
    fractions[i] = root_fraction(primes[i], power);
  }
  return fractions;
}

constexpr auto kFirstState = root_fractions<8>(2);
constexpr auto kRoundConstants = root_fractions<kRounds>(3);

uint32_t rotated(uint32_t word, int bits) {
  return (word >> bits) | (word << (32 - bits));
}

class Sha256 {
 public:
  void add(const void* data, size_t bytes) {
    const auto* next = static_cast<const uint8_t*>(data);
    total_ += bytes;
    while (bytes > 0) {
      const size_t part = std::min(bytes, kBlockBytes - filled_);
      std::memcpy(block_.data() + filled_, next, part);
      filled_ += part;
      next += part;
      bytes -= part;
      if (filled_ == kBlockBytes) {
        mix();
      }
    }
  }

  Digest digest() {
    const uint64_t bits = total_ * 8;
    const uint8_t end = 0x80;
    add(&end, 1);
    const uint8_t zero = 0;
    while (filled_ != kBlockBytes - kLengthBytes) {
      add(&zero, 1);
    }
    std::array<uint8_t, kLengthBytes> length;
    for (size_t i = 0; i < length.size(); ++i) {
      length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    }
    add(length.data(), length.size());
    Digest result;
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return result;
  }

 private:
  void mix() {
    std::array<uint32_t, kRounds> words;
    for (size_t i = 0; i < 16; ++i) {
      words[i] =
          uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 | uint32_t(block_[4 * i + 2]) << 8 | block_[4 * i + 3];
    }
    for (size_t i = 16; i < kRounds; ++i) {
      const uint32_t early = words[i - 15];
      const uint32_t late = words[i - 2];
      words[i] = words[i - 16] + (rotated(early, 7) ^ rotated(early, 18) ^ early >> 3) + words[i - 7] +
          (rotated(late, 17) ^ rotated(late, 19) ^ late >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < kRounds; ++i) {
      const uint32_t choice = (e & f) ^ (~e & g);
      const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      const uint32_t first = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + choice + kRoundConstants[i] + words[i];
      const uint32_t second = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + majority;
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    const std::array<uint32_t, 8> mixed{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) {
      state_[i] += mixed[i];
    }
    filled_ = 0;
  }

  std::array<uint32_t, 8> state_ = kFirstState;
  std::array<uint8_t, kBlockBytes> block_{};
  size_t filled_ = 0;
  uint64_t total_ = 0;
};

} // namespace

std::array<uint8_t, 32> hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t bytes) {
  std::array<uint8_t, kBlockBytes> padded{};
  if (key_bytes > kBlockBytes) {
    Sha256 hash;
    hash.add(key, key_bytes);
    const auto digest = hash.digest();
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else if (key_bytes > 0) {
    std::memcpy(padded.data(), key, key_bytes);
  }
  const auto keyed = [&](uint8_t mask) {
    auto block = padded;
    for (auto& byte : block) {
      byte ^= mask;
    }
    Sha256 hash;
    hash.add(block.data(), block.size());
    return hash;
  };
  auto inner = keyed(0x36);
  inner.add(data, bytes);
  const auto digest = inner.digest();
  auto outer = keyed(0x5c);
  outer.add(digest.data(), digest.size());
  return outer.digest();
}

bool equal_in_constant_time(const std::array<uint8_t, 32>& a, const std::array<uint8_t, 32>& b) {
  volatile uint8_t difference = 0; // volatile, so that the compiler does not stop early
  for (size_t i = 0; i < a.size(); ++i) {
    difference = difference | (a[i] ^ b[i]);
  }
  return difference == 0;
}

} // namespace fog

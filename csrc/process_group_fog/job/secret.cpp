#include "job/secret.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include <c10/util/Exception.h>

#include "core/settings.hpp"

namespace fog {
namespace {

std::mutex mutex;
std::string secret;

void fill_randomly(void* data, size_t bytes) {
  auto* next = static_cast<char*>(data);
  while (bytes > 0) {
    const auto count = getrandom(next, bytes, 0);
    if (count < 0) {
      TORCH_CHECK(errno == EINTR, "fog: getrandom failed with error ", errno);
      continue;
    }
    next += count;
    bytes -= static_cast<size_t>(count);
  }
}

} // namespace

const std::string& job_secret() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (secret.empty()) {
    secret = settings().job_secret;
  }
  return secret;
}

void set_job_secret(const std::string& made) {
  if (job_secret().empty()) {
    const std::lock_guard<std::mutex> lock(mutex);
    secret = made;
  }
}

void forget_job_secret() {
  const std::lock_guard<std::mutex> lock(mutex);
  secret.clear();
}

std::string random_digits(size_t count) {
  return random_secret().substr(0, count);
}

std::string random_secret() {
  std::array<uint8_t, 32> bytes;
  fill_randomly(bytes.data(), bytes.size());
  return hexadecimal(bytes);
}

std::string hexadecimal(const std::array<uint8_t, 32>& bytes) {
  std::string text;
  for (const uint8_t byte : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Nonce random_nonce() {
  Nonce nonce;
  fill_randomly(nonce.data(), nonce.size());
  return nonce;
}

std::array<uint8_t, 32> proof_of(const std::string& text) {
  const auto& key = job_secret();
  TORCH_CHECK(!key.empty(), "fog: the job's secret is not known yet");
  return hmac_sha256(key.data(), key.size(), text.data(), text.size());
}

namespace {

using Digest = std::array<uint8_t, 32>;

constexpr size_t kBlockBytes = 64;
constexpr size_t kRounds = 64;
constexpr size_t kLengthBytes = 8;

// The first 32 bits of the fractions of the square roots of the first 8 primes, and of the cube roots of the first 64.
constexpr std::array<uint32_t, 8> kFirstState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::array<uint32_t, kRounds> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

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

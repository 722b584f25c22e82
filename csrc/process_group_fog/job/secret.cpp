#include "job/secret.hpp"

#include <sys/random.h>

#include <cerrno>
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

std::string random_secret() {
  std::array<uint8_t, 32> bytes;
  fill_randomly(bytes.data(), bytes.size());
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

} // namespace fog

// The job's secret. A process that wants to take part in a job proves that it knows it; the secret does not travel.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace fog {

// Returns the secret of this process's job: FOG_JOB_SECRET, or what rank 0 of its world has made; empty if there is
// none yet. The reference stays valid, and its value once there is a job.
const std::string& job_secret();

// Sets the secret, once, if the environment has none.
void set_job_secret(const std::string& secret);
// The job has not come about. The next one has a secret of its own.
void forget_job_secret();

// Returns so many random hexadecimal digits, 64 at most: for names, fewer than a secret has.
std::string random_digits(size_t count);
// Returns 32 random bytes, as hexadecimal digits.
std::string random_secret();
std::string hexadecimal(const std::array<uint8_t, 32>& bytes);

// A number that is used once, so that an overheard proof cannot be used again.
using Nonce = std::array<uint8_t, 16>;
Nonce random_nonce();

// Returns the proof that this process knows the job's secret; `text` says to whom, about what, and with which nonces.
std::array<uint8_t, 32> proof_of(const std::string& text);

// HMAC with SHA-256 (RFC 2104, FIPS 180-4): proofs that a process knows a key, which do not show the key.

std::array<uint8_t, 32> hmac_sha256(const void* key, size_t key_bytes, const void* data, size_t bytes);

// Compares proofs in a time that does not depend on the first byte that differs.
bool equal_in_constant_time(const std::array<uint8_t, 32>& a, const std::array<uint8_t, 32>& b);

} // namespace fog

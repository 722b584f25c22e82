// What the two sides of a new connection send each other before any message.
//
// The side that connects says who it is and whom it means. Then each side proves that it knows the job's secret, for a
// nonce of the other side: first the one that connects, so that an unknown side gets no proof. The connection is used once
// the side that connects has said that it has read the welcome.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <type_traits>

#include "job/secret.hpp"

namespace fog::tcp {

using Proof = std::array<uint8_t, 32>;

// From the side that connects. A number of the job may have several processes one after the other, so each has a mark too.
struct Hello {
  std::array<char, 8> magic;
  int32_t from; // or kJoins
  int32_t to;
  uint64_t from_mark;
  uint64_t to_mark;
  Nonce nonce;
};
// Of a process that is no member, and only wants the other side's attention.
constexpr int32_t kJoins = -1;
// The answer of the side that accepts is a Nonce; then the side that connects sends a Proof.

// From the side that accepts.
struct Verdict {
  char word;
  Proof proof; // zeros with kLater
};
constexpr char kWelcome = 'y';
constexpr char kLater = 'l'; // this side is connecting to the other one already, or does not know it yet
constexpr char kNever = 'n'; // this side has done with the other one

// From the side that connects.
constexpr char kReady = 'r';

static_assert(std::is_trivially_copyable_v<Hello> && std::is_trivially_copyable_v<Verdict>);

// `additional` says that the two have a connection already, and that this one carries data only.
Hello hello(int from, uint64_t from_mark, int to, uint64_t to_mark, bool additional = false);
bool is_additional(const Hello& hello);
// Returns whether these bytes are the hello of a process of this build, for process `self` with that mark.
bool is_for(const Hello& hello, int self, uint64_t mark);

// The mark of the process that has told with this line where it listens; 0 if the line has none.
uint64_t mark_of(const std::string& line);
// Returns the line with a new mark.
std::string with_mark(const std::string& line);

enum class Side : uint8_t { kConnects, kAccepts };
// Returns the proof of one side; `nonce` is that of the side that accepts.
Proof prove(Side side, const Hello& hello, const Nonce& nonce);
bool is_proof(const Proof& proof, Side side, const Hello& hello, const Nonce& nonce);

// How a process that is no member of the job yet calls for the attention of one that is, at the address where that one
// listens for messages.

// Calls world rank `to`, which listens at `line`, from any thread. Both sides prove that they know the job's secret.
// Returns whether it has heard the call: false if nobody answers within `timeout`, or somebody else does.
bool call_to_join(const std::string& line, int to, std::chrono::milliseconds timeout);

} // namespace fog::tcp

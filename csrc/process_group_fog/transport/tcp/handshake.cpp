#include "transport/tcp/handshake.hpp"

#include <cstdlib>
#include <string>

namespace fog::tcp {
namespace {

constexpr std::array<char, 8> kMagic = {'f', 'o', 'g', ' ', 't', 'c', 'p', '2'};

constexpr const char* kMark = " mark=";
constexpr size_t kDigits = 16; // of a 64-bit number

} // namespace

Hello hello(int from, uint64_t from_mark, int to, uint64_t to_mark) {
  return {kMagic, from, to, from_mark, to_mark, random_nonce()};
}

bool is_for(const Hello& hello, int self, uint64_t mark) {
  return hello.magic == kMagic && hello.to == self && hello.to_mark == mark && hello.from != self && hello.from >= kJoins;
}

uint64_t mark_of(const std::string& line) {
  const auto at = line.find(kMark);
  return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at + std::string(kMark).size(), nullptr, 16);
}

std::string with_mark(const std::string& line) {
  return line.empty() ? line : line + kMark + random_secret().substr(0, kDigits);
}

Proof prove(Side side, const Hello& hello, const Nonce& nonce) {
  std::string text = side == Side::kConnects ? "fog tcp connects" : "fog tcp accepts";
  text.append(reinterpret_cast<const char*>(&hello), sizeof(hello));
  text.append(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  return proof_of(text);
}

bool is_proof(const Proof& proof, Side side, const Hello& hello, const Nonce& nonce) {
  return equal_in_constant_time(proof, prove(side, hello, nonce));
}

} // namespace fog::tcp

#include "transport/tcp/handshake.hpp"

#include <string>

namespace fog::tcp {
namespace {

constexpr std::array<char, 8> kMagic = {'f', 'o', 'g', ' ', 't', 'c', 'p', '1'};

} // namespace

Hello hello(int from, int to) {
  return {kMagic, from, to, random_nonce()};
}

bool is_for(const Hello& hello, int self) {
  return hello.magic == kMagic && hello.to == self && hello.from != self && hello.from >= 0;
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

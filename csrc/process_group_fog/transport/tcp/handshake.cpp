#include "transport/tcp/handshake.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <string>

#include "job/peer_sockets.hpp"

namespace fog::tcp {
namespace {

constexpr std::array<char, 8> kMagic = {'f', 'o', 'g', ' ', 't', 'c', 'p', '2'};
constexpr std::array<char, 8> kAdditional = {'f', 'o', 'g', ' ', 't', 'c', 'p', '+'};

constexpr const char* kMark = " mark=";
constexpr size_t kDigits = 16; // of a 64-bit number

} // namespace

Hello hello(int from, uint64_t from_mark, int to, uint64_t to_mark, bool additional) {
  return {additional ? kAdditional : kMagic, from, to, from_mark, to_mark, random_nonce()};
}

bool is_additional(const Hello& hello) {
  return hello.magic == kAdditional;
}

bool is_for(const Hello& hello, int self, uint64_t mark) {
  return (hello.magic == kMagic || is_additional(hello)) && hello.to == self && hello.to_mark == mark && hello.from != self &&
      hello.from >= kJoins;
}

uint64_t mark_of(const std::string& line) {
  const auto at = line.find(kMark);
  return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at + std::string(kMark).size(), nullptr, 16);
}

std::string with_mark(const std::string& line) {
  return line.empty() ? line : line + kMark + random_digits(kDigits);
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

namespace {

using Clock = std::chrono::steady_clock;

class Call {
 public:
  Call(const PeerAddress& to, Clock::time_point limit) : socket_(begin_to_connect(to)), limit_(limit) {}

  bool connected() const {
    return socket_.fd() >= 0 && socket_.await(POLLOUT, limit_) && error_of_socket(socket_.fd()) == 0;
  }
  template <typename Word>
  bool put(const Word& word) const { // so few bytes always fit
    return ::send(socket_.fd(), &word, sizeof(word), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(word));
  }
  template <typename Word>
  bool take(Word& word) const {
    auto* bytes = reinterpret_cast<char*>(&word);
    for (size_t come = 0; come < sizeof(word);) {
      if (!socket_.await(POLLIN, limit_)) {
        return false;
      }
      const auto count = recv(socket_.fd(), bytes + come, sizeof(word) - come, 0);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) {
        return false;
      }
      come += static_cast<size_t>(std::max<ssize_t>(count, 0));
    }
    return true;
  }

 private:
  const OwnedSocket socket_;
  const Clock::time_point limit_;
};

} // namespace

bool call_to_join(const std::string& line, int to, std::chrono::milliseconds timeout) {
  const auto places = read_listener(line, {});
  for (size_t i = 0; i < places.size(); ++i) {
    const Call call(places[i], Clock::now() + timeout / places.size());
    const auto greeting = hello(kJoins, 0, to, mark_of(line));
    Nonce nonce;
    Verdict verdict;
    if (call.connected() && call.put(greeting) && call.take(nonce) && call.put(prove(Side::kConnects, greeting, nonce)) &&
        call.take(verdict) && verdict.word == kWelcome && is_proof(verdict.proof, Side::kAccepts, greeting, nonce)) {
      return true;
    }
  }
  return false;
}

} // namespace fog::tcp

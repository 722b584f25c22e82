// The codec that a text names. One-sided messages name their codec, because their receiver's program does not.
#include <charconv>
#include <cstdint>
#include <map>

#include <c10/util/Exception.h>

#include "core/codecs/codecs.hpp"

namespace fog::codecs {
namespace {

// "Name(word, key=value)". A word is a key without a value.
struct Call {
  std::string name;
  std::map<std::string, std::string> arguments;

  explicit Call(const std::string& text) {
    const size_t open = text.find('(');
    if (open == std::string::npos || text.back() != ')') {
      return;
    }
    name = text.substr(0, open);
    for (size_t at = open + 1; at < text.size() - 1;) {
      const size_t end = std::min(text.find(", ", at), text.size() - 1);
      const auto argument = text.substr(at, end - at);
      const size_t equals = argument.find('=');
      arguments[argument.substr(0, equals)] = equals == std::string::npos ? "" : argument.substr(equals + 1);
      at = end + 2;
    }
  }
  bool has(const std::string& key) const {
    return arguments.count(key) > 0;
  }
  // 0 if it is missing or no number.
  template <typename Number>
  Number number(const std::string& key) const {
    Number value = 0;
    const auto found = arguments.find(key);
    if (found != arguments.end()) {
      const auto& digits = found->second;
      std::from_chars(digits.data(), digits.data() + digits.size(), value);
    }
    return value;
  }
};

CodecPtr make(const Call& call) {
  const auto block = call.number<int64_t>("block");
  const bool stochastic = call.has("stochastic");
  const auto seed = call.number<uint64_t>("seed");
  const auto fraction = call.number<double>("fraction");
  const auto k = call.number<int64_t>("k");
  if (call.name == "Float16") {
    return float16();
  }
  if (call.name == "BFloat16") {
    return bfloat16();
  }
  if (call.name == "Int8" || call.name == "Int4") {
    return integers(call.name == "Int8" ? 8 : 4, block, stochastic, seed);
  }
  if (call.name == "Sign") {
    return sign(block, stochastic, seed);
  }
  if (call.name == "TopK") {
    return top_k(fraction, k, call.has("bits") ? call.number<int>("bits") : 32);
  }
  return call.name == "RandomK" ? random_k(fraction, k, seed) : nullptr;
}

} // namespace

CodecPtr codec_of(const std::string& text) {
  const auto codec = make(Call(text));
  TORCH_CHECK_VALUE(codec && codec->text() == text, "compression: got '", text, "', which is no codec of fog");
  return codec;
}

} // namespace fog::codecs

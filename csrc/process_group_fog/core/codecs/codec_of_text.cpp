// The codec that a text names. One-sided messages name their codec, because their receiver's program does not.
#include <charconv>
#include <cstdint>

#include <c10/util/Exception.h>

#include "core/codecs/codecs.hpp"

namespace fog::codecs {
namespace {

// The number behind "key=" in "Name(key=number, ...)"; 0 if it is missing or no number.
template <typename Number>
Number number(const std::string& text, const std::string& key) {
  Number value = 0;
  const size_t place = text.find(key + '=');
  if (place != std::string::npos) {
    std::from_chars(text.data() + place + key.size() + 1, text.data() + text.size(), value);
  }
  return value;
}

CodecPtr make(const std::string& text) {
  const auto name = text.substr(0, text.find('('));
  if (name == "Float16") {
    return float16();
  }
  if (name == "BFloat16") {
    return bfloat16();
  }
  if (name == "Int8") {
    return int8(number<int64_t>(text, "block"));
  }
  if (name == "TopK") {
    const int bits = number<int>(text, "bits");
    return top_k(number<double>(text, "fraction"), number<int64_t>(text, "k"), bits == 0 ? 32 : bits);
  }
  return nullptr;
}

} // namespace

CodecPtr codec_of(const std::string& text) {
  const auto codec = make(text);
  TORCH_CHECK_VALUE(codec && codec->text() == text, "compression: got '", text, "', which is no codec of fog");
  return codec;
}

} // namespace fog::codecs

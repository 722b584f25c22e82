#include "core/failure.hpp"

#include <algorithm>
#include <cstdint>
#include <new>

#include <c10/util/Exception.h>

namespace fog {

std::exception_ptr backend_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (const std::bad_alloc&) { // not the requested error; the caller may try again
    throw;
  } catch (...) {
    return std::current_exception();
  }
}

std::string text_from_peer(const char* data, size_t bytes) {
  std::string text(data, bytes);
  for (size_t at = 0; at < bytes;) {
    const auto first = static_cast<unsigned char>(text[at]);
    const size_t length = first < 0x80 ? 1 : first < 0xc2 || first > 0xf4 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    uint32_t character = length < 2 ? first : first & (0x7fU >> length);
    size_t found = std::min<size_t>(length, 1);
    for (; found < length && at + found < bytes && (text[at + found] & 0xc0) == 0x80; ++found) {
      character = character << 6 | (text[at + found] & 0x3fU);
    }
    const bool too_long = (length == 3 && character < 0x800) || (length == 4 && (character < 0x10000 || character > 0x10ffff));
    if (length == 0 || found < length || too_long || (character >= 0xd800 && character < 0xe000)) {
      text[at++] = '?';
    } else {
      at += length;
    }
  }
  return text;
}

std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
}

} // namespace fog

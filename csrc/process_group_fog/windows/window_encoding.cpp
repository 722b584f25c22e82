// The codec of a Window, and the messages of its puts and accumulates.
#include <cstring>
#include <utility>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "core/tensor_checks.hpp"
#include "windows/window_legs.hpp"

namespace fog {
namespace {

// The random numbers of windows are those of parts of exchanges that no exchange of tensors has: see Draw.
constexpr uint64_t kFirstPart = 2048;
constexpr uint64_t kParts = 2048;

} // namespace

void Window::check_codec(const char* op, const Options& options) {
  const auto& codec = *options.codec;
  codec.check(op, values_.dtype);
  if (options.decoded.defined()) {
    TORCH_CHECK_VALUE(!staging_, op, ": decoded: got a tensor for a window on ", device_, "; allowed is the CPU");
    check_output(op, "decoded", options.decoded);
    TORCH_CHECK_VALUE(
        options.decoded.is_contiguous() && layout_of(options.decoded) == layout_, op, ": decoded: got ", layout_of(options.decoded),
        "; allowed is a contiguous ", layout_, " as window '", name_, "' has it");
  }
  check_agreed(op, memory_->label(), group_->rank, codec.text());
  const std::lock_guard<std::mutex> lock(codec_mutex_);
  codec_ = options.codec;
}

void Window::check_agreed(const char* op, WindowLabel& label, int rank, const std::string& codec) const {
  TORCH_CHECK_VALUE(
      label.codec.agree(codec), op, ": compression: got ", codec, "; window '", name_, "' has ", label.codec.shown(), " on rank ", rank,
      ", since its first compressed put or accumulate");
}

CodecPtr Window::agreed_codec(const char* op, const std::string& text) {
  const std::lock_guard<std::mutex> lock(codec_mutex_);
  if (!codec_ || codec_->text() != text) {
    auto codec = codecs::codec_of(text);
    check_agreed(op, memory_->label(), group_->rank, text);
    codec_ = std::move(codec);
  }
  return codec_;
}

at::Tensor Window::make_message(const at::Tensor& data, const Options& options) {
  const auto& codec = *options.codec;
  const auto& text = codec.text();
  const size_t bytes = codec.bytes(values_.dtype, values_.numel);
  auto message = at::empty({static_cast<int64_t>(bytes + text.size())}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  auto* out = message.mutable_data_ptr<uint8_t>();
  const uint64_t part = kFirstPart + number_ % kParts;
  codec.encode(
      values_.dtype, data.const_data_ptr(), values_.numel, {part << 32 | encoded_++, static_cast<uint32_t>(group_->rank)}, out);
  std::memcpy(out + bytes, text.data(), text.size());
  if (options.decoded.defined()) {
    encoded(options.codec, message).write(options.decoded.mutable_data_ptr(), 1.0);
    count_change(options.decoded);
  }
  return message;
}

EncodedValues Window::encoded(const CodecPtr& codec, const at::Tensor& message) const {
  return {codec, values_.dtype, values_.numel, message.const_data_ptr(), message.nbytes() - codec->text().size()};
}

} // namespace fog

#include "backend/bindings.hpp"

#include <string>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>

#include "backend/arguments.hpp"
#include "core/tensor_checks.hpp"

namespace py = pybind11;

namespace fog {
namespace {

BoundCodec bound(const CodecPtr& codec) {
  return std::const_pointer_cast<Codec>(codec);
}

c10::ScalarType type_of(const py::object& dtype) {
  TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "dtype: got ", std::string(py::str(dtype)), "; allowed is a torch.dtype");
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

size_t bytes_of(const Codec& self, const py::object& dtype, int64_t numel) {
  const auto type = type_of(dtype);
  self.check("bytes", type);
  TORCH_CHECK_VALUE(numel >= 0, "numel: got ", numel, "; allowed is 0 or more");
  return self.bytes(type, static_cast<size_t>(numel));
}

// Throws ValueError unless `message` has the bytes of a message.
void check_message(const char* op, const at::Tensor& message, size_t bytes) {
  TORCH_CHECK_VALUE(
      message.scalar_type() == at::kByte && message.is_contiguous() && static_cast<size_t>(message.numel()) == bytes, op,
      ": message: got ", message.numel(), " elements of ", message.scalar_type(), "; allowed are ", bytes, " contiguous ones of uint8");
}

// Codecs work on the host, so tensors of a device are copied.
void encode(const Codec& self, const at::Tensor& tensor, at::Tensor& message) {
  constexpr const char* kOp = "encode";
  const auto device = where_is(tensor);
  check_tensor(kOp, "tensor", tensor, device);
  check_output(kOp, "message", message, device);
  self.check(kOp, tensor.scalar_type());
  const auto numel = static_cast<size_t>(tensor.numel());
  check_message(kOp, message, self.bytes(tensor.scalar_type(), numel));
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  const auto given = tensor.contiguous().cpu();
  const auto made = message.cpu();
  self.encode(given.scalar_type(), given.const_data_ptr(), numel, made.mutable_data_ptr<uint8_t>());
  if (!device.is_cpu()) {
    message.copy_(made);
  }
}

void decode(const Codec& self, const at::Tensor& message, at::Tensor& output) {
  constexpr const char* kOp = "decode";
  const auto device = where_is(message);
  check_tensor(kOp, "message", message, device);
  check_output(kOp, "output", output, device);
  const auto dtype = output.scalar_type();
  self.check(kOp, dtype);
  TORCH_CHECK_VALUE(output.is_contiguous(), kOp, ": output: got one that is not contiguous");
  const auto numel = static_cast<size_t>(output.numel());
  check_message(kOp, message, self.bytes(dtype, numel));
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  const auto given = message.cpu();
  const auto made = output.cpu();
  const auto* data = given.const_data_ptr<uint8_t>();
  self.decode(dtype, numel, self.open(dtype, numel, data), data, 0, numel, made.mutable_data_ptr());
  if (!device.is_cpu()) {
    output.copy_(made);
  }
}

} // namespace

void bind_codecs(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release_gil;
  py::class_<Codec, BoundCodec>(module, "Codec")
      .def_static("float16", [] { return bound(codecs::float16()); })
      .def_static("bfloat16", [] { return bound(codecs::bfloat16()); })
      .def_static(
          "int8", [](int64_t block) { return bound(codecs::int8(block)); }, py::arg("block"))
      .def_static(
          "top_k", [](double fraction, int64_t k, int bits) { return bound(codecs::top_k(fraction, k, bits)); }, py::arg("fraction"),
          py::arg("k"), py::arg("bits"))
      .def_property_readonly("text", &Codec::text)
      .def("bytes", &bytes_of, py::arg("dtype"), py::arg("numel"))
      .def("encode", &encode, py::arg("tensor"), py::arg("message"), release_gil)
      .def("decode", &decode, py::arg("message"), py::arg("output"), release_gil);
}

} // namespace fog

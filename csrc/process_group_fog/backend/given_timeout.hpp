// Conversion of Python's timeouts.
#pragma once

#include <chrono>

#include <c10/util/Exception.h>
#include <pybind11/chrono.h>

namespace fog {

// A timedelta. pybind11's own conversion counts microseconds, which overflow for the largest values.
struct GivenTimeout {
  std::chrono::milliseconds value{0};
};

// Throws ValueError unless it is positive.
inline std::chrono::milliseconds checked(GivenTimeout timeout) {
  TORCH_CHECK_VALUE(timeout.value.count() > 0, "timeout: got ", timeout.value.count(), " ms; allowed is more than 0");
  return timeout.value;
}

} // namespace fog

namespace pybind11::detail {

template <>
struct type_caster<fog::GivenTimeout> {
  PYBIND11_TYPE_CASTER(fog::GivenTimeout, const_name("datetime.timedelta"));

  bool load(handle source, bool) {
    if (PyDateTimeAPI == nullptr) {
      PyDateTime_IMPORT;
    }
    if (!source || !PyDelta_Check(source.ptr())) {
      return false;
    }
    const std::chrono::seconds seconds(
        int64_t(PyDateTime_DELTA_GET_DAYS(source.ptr())) * 86400 + PyDateTime_DELTA_GET_SECONDS(source.ptr()));
    value.value = seconds +
        std::chrono::floor<std::chrono::milliseconds>(std::chrono::microseconds(PyDateTime_DELTA_GET_MICROSECONDS(source.ptr())));
    return true;
  }
};

} // namespace pybind11::detail

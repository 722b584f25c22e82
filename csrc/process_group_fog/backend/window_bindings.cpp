#include "backend/bindings.hpp"

#include <optional>

#include <pybind11/stl.h>

#include "backend/given_timeout.hpp"
#include "windows/window.hpp"

namespace py = pybind11;

namespace fog {
namespace {

using Ranks = std::vector<int>;
using Timeout = std::optional<GivenTimeout>;

// The window's timeout, unless the call has its own.
std::chrono::milliseconds checked(const Timeout& timeout, const Window& window) {
  return timeout ? checked(*timeout) : window.timeout();
}

} // namespace

// Keep one argument per line.
// clang-format off
void bind_windows(py::module_& module, GroupClass& group) {
  const py::call_guard<py::gil_scoped_release> release_gil;
  py::class_<Window::Hold>(module, "WindowHold").def("release", &Window::Hold::release, release_gil);
  auto window = py::class_<Window, std::shared_ptr<Window>>(module, "Window");
  const auto write = [&](const char* name, auto method) {
    window.def(
        name,
        [method](Window& self, const at::Tensor& tensor, const Window::Peers& destinations, double self_weight, bool with_p, bool mutex,
                 bool skip_lost, Timeout timeout, bool waits) {
          return (self.*method)(tensor, destinations, {with_p, mutex, skip_lost, checked(timeout, self), self_weight, waits});
        },
        py::arg("tensor"),
        py::arg("destinations"),
        py::arg("self_weight") = 1.0,
        py::arg("with_p") = false,
        py::arg("mutex") = false,
        py::arg("skip_lost") = false,
        py::arg("timeout") = py::none(),
        py::arg("waits") = false,
        release_gil);
  };
  write("put", &Window::put);
  write("accumulate", &Window::accumulate);
  window
      .def(
          "get",
          [](Window& self, const Window::Peers& sources, bool mutex, bool skip_lost, Timeout timeout, bool waits) {
            return self.get(sources, {false, mutex, skip_lost, checked(timeout, self), 1.0, waits});
          },
          py::arg("sources"),
          py::kw_only(),
          py::arg("mutex") = false,
          py::arg("skip_lost") = false,
          py::arg("timeout") = py::none(),
          py::arg("waits") = false,
          release_gil)
      .def(
          "update",
          [](Window& self, double self_weight, const Window::Peers& neighbors, bool reset, bool clone, bool mutex, bool with_p,
             Timeout timeout) {
            return self.update(
                self_weight, neighbors, reset, clone, {with_p, mutex, false, checked(timeout, self)});
          },
          py::arg("self_weight"),
          py::arg("neighbors"),
          py::kw_only(),
          py::arg("reset") = false,
          py::arg("clone") = false,
          py::arg("mutex") = false,
          py::arg("with_p") = false,
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "write",
          [](Window& self, const at::Tensor& tensor, int destination, int64_t offset, Timeout timeout) {
            return self.write(tensor, destination, offset, {false, false, false, checked(timeout, self)});
          },
          py::arg("tensor"),
          py::arg("destination"),
          py::arg("offset"),
          py::kw_only(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "signal",
          [](Window& self, int destination, Timeout timeout) {
            return self.signal(destination, {false, false, false, checked(timeout, self)});
          },
          py::arg("destination"),
          py::kw_only(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "wait_signal",
          [](Window& self, int source, Timeout timeout) {
            return self.wait_signal(source, {false, false, false, checked(timeout, self)});
          },
          py::arg("source"),
          py::kw_only(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "map_remote",
          [](Window& self, int rank) {
            auto mapped = self.map_remote(rank);
            return mapped.defined() ? std::make_optional(std::move(mapped)) : std::nullopt;
          },
          py::arg("rank"),
          release_gil)
      .def("version", &Window::version, py::arg("rank"), release_gil)
      .def("slot_p", &Window::slot_p, py::arg("rank"), release_gil)
      .def("is_gone", &Window::is_gone, py::arg("rank"), release_gil)
      .def(
          "hold",
          [](Window& self, Ranks ranks, bool own, Timeout timeout) {
            return self.hold(std::move(ranks), own, checked(timeout, self));
          },
          py::arg("ranks"),
          py::kw_only(),
          py::arg("own") = false,
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "free", [](Window& self, Timeout timeout) { self.free(checked(timeout, self)); },
          py::arg("timeout") = py::none(), release_gil)
      .def_property("p", py::cpp_function(&Window::p, release_gil), py::cpp_function(&Window::set_p, release_gil))
      .def_property_readonly("tensor", &Window::tensor)
      .def_property_readonly("name", &Window::name)
      .def_property_readonly("transport", &Window::transport)
      .def("transport_to", &Window::transport_to, py::arg("rank"))
      .def_property_readonly("in_neighbors", &Window::in_neighbors)
      .def_property_readonly("out_neighbors", &Window::out_neighbors);
  group.def(
      "create_window",
      [](ProcessGroupFog& self, const at::Tensor& tensor, const std::string& name, Ranks in_neighbors, Ranks out_neighbors, bool zero_init,
         Timeout timeout) {
        return self.create_window(
            tensor, name, std::move(in_neighbors), std::move(out_neighbors), zero_init,
            timeout ? std::make_optional(checked(*timeout)) : std::nullopt);
      },
      py::arg("tensor"),
      py::arg("name"),
      py::arg("in_neighbors"),
      py::arg("out_neighbors"),
      py::kw_only(),
      py::arg("zero_init") = false,
      py::arg("timeout") = py::none(),
      release_gil);
}
// clang-format on

} // namespace fog

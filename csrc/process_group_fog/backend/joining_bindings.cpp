#include "backend/bindings.hpp"

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "engine/joining.hpp"
#include "engine/process_engine.hpp"
#include "job/peer_information.hpp"
#include "job/peer_sockets.hpp"
#include "job/rendezvous.hpp"
#include "job/secret.hpp"

namespace py = pybind11;

namespace fog {

void bind_joining(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release_gil;
  module.def("job_secret", &job_secret);
  module.def("set_job_secret", &set_job_secret, py::arg("secret"));
  module.def("announced", [] { return process_engine().announced(); });
  module.def("own_entry", &own_entry, release_gil);
  module.def("announce", &announce, py::arg("entry"), release_gil);
  module.def(
      "read_entry",
      [](const std::string& entry) {
        const auto read = read_peer_information(entry);
        py::dict result;
        result["host_name"] = read.host_name;
        std::vector<std::string> addresses;
        for (const auto& address : read_listener(read.tcp, {})) {
          addresses.push_back(address.text);
        }
        result["addresses"] = std::move(addresses);
        result["is_visible"] = is_visible(entry);
        return result;
      },
      py::arg("entry"));
  module.def(
      "prepare_to_join",
      [](int rank, int size, const std::vector<std::string>& entries, const c10::intrusive_ptr<c10d::Store>& store,
         std::chrono::milliseconds timeout) { prepare_to_join(rank, size, entries, host_of(store), timeout); },
      py::arg("rank"), py::arg("size"), py::arg("entries"), py::arg("store"), py::arg("timeout"), release_gil);
  module.def(
      "add_whole",
      [](uint64_t id, int rank, const std::vector<int>& hosts, const std::string& reason, const c10::intrusive_ptr<c10d::Store>& store,
         const c10::intrusive_ptr<ProcessGroupFog::Options>& options) {
        auto group = add_whole(id, options->group_name, rank, hosts, reason);
        return c10::make_intrusive<ProcessGroupFog>(std::move(group), options, nullptr, store);
      },
      py::arg("id"), py::arg("rank"), py::arg("hosts"), py::arg("reason"), py::arg("store"), py::arg("options"), release_gil);
  module.def("connect_with", &connect_with, py::arg("entries"), py::arg("is_member"), py::arg("timeout"), release_gil);
}

} // namespace fog

// Bindings for tests: inspection of internals, and replacements for the machine and the job.
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/protocol.hpp"
#include "engine/call_gaps.hpp"
#include "engine/liveness.hpp"
#include "engine/process_engine.hpp"
#include "job/hosts.hpp"
#include "job/rendezvous.hpp"
#include "job/secret.hpp"
#include "testing/virtual_world.hpp"
#include "transport/shared_memory/machine.hpp"
#include "transport/tcp/growth.hpp"
#include "windows/deferred_free.hpp"

namespace py = pybind11;

namespace fog {
namespace {

using Seconds = std::chrono::duration<double>;

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
}

Deadline at(double seconds) {
  return Deadline(nanoseconds(seconds));
}

void bind_liveness(py::module_& module) {
  module.def(
      "usual_gap",
      [](const std::vector<std::pair<double, double>>& samples) {
        std::vector<CallGaps::Sample> converted;
        for (const auto& [longest, period] : samples) {
          converted.push_back({nanoseconds(longest), nanoseconds(period)});
        }
        return Seconds(CallGaps::usual(converted)).count();
      },
      py::arg("samples"));
  using AllSigns = std::map<int, std::tuple<uint64_t, uint64_t, bool, double, double>>;
  py::class_<Liveness>(module, "Liveness")
      .def(
          py::init([](double lost_after) {
            auto liveness = std::make_unique<Liveness>();
            liveness->set_lost_after(nanoseconds(lost_after));
            return liveness;
          }),
          py::arg("lost_after"))
      .def(
          "watch", [](Liveness& self, int peer, double end, bool program) { self.watch(peer, at(end), program); }, py::arg("peer"),
          py::arg("end"), py::arg("program"))
      .def(
          "judge",
          [](Liveness& self, double now, bool paused, const AllSigns& all) {
            std::map<int, std::string> verdicts;
            const auto read = [&](PeerId peer) -> std::optional<Signs> {
              const auto found = all.find(peer);
              if (found == all.end()) {
                return std::nullopt;
              }
              const auto& [beats, calls, excused, usual, oldest] = found->second;
              return Signs{beats, calls, excused, nanoseconds(usual), nanoseconds(oldest)};
            };
            for (const auto& [peer, how] : self.judge(at(now), paused, read)) {
              verdicts[peer] = how;
            }
            return verdicts;
          },
          py::arg("now"), py::arg("paused"), py::arg("signs"))
      .def("suspects", &Liveness::suspects, py::arg("peer"));
}

void bind_growth(py::module_& module) {
  using tcp::Growth;
  py::class_<Growth>(module, "Growth")
      .def(py::init<>())
      .def("begin", &Growth::begin)
      .def(
          "look",
          [](Growth& self, double now, uint64_t written, double least_round_trip, double round_trip, double limited) {
            return self.look(at(now), written, tcp::Path{least_round_trip, round_trip, 0.0, limited});
          },
          py::arg("now"), py::arg("written"), py::arg("least_round_trip"), py::arg("round_trip"), py::arg("limited"))
      .def("on_open", &Growth::on_open)
      .def_property_readonly("used", &Growth::used)
      .def_property_readonly("rate", &Growth::rate);
}

} // namespace

void bind_testing(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> release_gil;
  bind_liveness(module);
  bind_growth(module);
  module.def("protocol", &protocol);
  module.def(
      "hmac_sha256",
      [](const std::string& key, const std::string& data) {
        const auto proof = hmac_sha256(key.data(), key.size(), data.data(), data.size());
        return py::bytes(reinterpret_cast<const char*>(proof.data()), proof.size());
      },
      py::arg("key"), py::arg("data"));
  module.def("arena_bytes", &shared_memory::arena_bytes, py::arg("memory"), py::arg("local_ranks"), py::arg("addresses"));
  module.def(
      "emulate",
      [](size_t page_bytes, size_t memory_bytes, const std::string& host_id, const std::string& other_protocol,
         std::optional<std::chrono::milliseconds> longest_sleep) {
        process_engine().set_longest_sleep(longest_sleep.value_or(std::chrono::milliseconds(20)));
        shared_memory::emulate_machine({page_bytes, memory_bytes});
        emulate_host(host_id);
        set_protocol(other_protocol.empty() ? protocol() : other_protocol);
      },
      py::kw_only(), py::arg("page_bytes") = 0, py::arg("memory_bytes") = 0, py::arg("host_id") = "", py::arg("protocol") = "",
      py::arg("longest_sleep") = py::none());
  module.def(
      "bookkeeping",
      [] {
        const auto sizes = process_engine().bookkeeping();
        return std::map<std::string, size_t>{
            {"names", sizes.names},
            {"closed_groups", sizes.closed_groups},
            {"early_bytes", sizes.early_bytes},
            {"deferred_windows", DeferredFree::size()}};
      },
      release_gil);
  module.def(
      "with_engine_locked",
      [](const std::function<void()>& call) {
        process_engine().with_lock([&] {
          const py::gil_scoped_acquire gil;
          call();
        });
      },
      py::arg("call"), release_gil);
  py::class_<Rendezvous>(module, "Rendezvous")
      .def(
          py::init<c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds, Rendezvous::Gone>(), py::arg("store"),
          py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("gone") = py::none(), release_gil)
      .def("allgather", &Rendezvous::allgather, py::arg("key"), py::arg("value"), release_gil)
      .def("finish", &Rendezvous::finish, release_gil);
  py::class_<VirtualWorld>(module, "VirtualWorld")
      .def(
          py::init([](int size, int ranks_per_host, std::vector<int> hosts, std::chrono::milliseconds timeout, bool confirm,
                      uint64_t seed, unsigned most_delay, std::string wire) {
            return std::make_unique<VirtualWorld>(
                VirtualWorld::Options{size, ranks_per_host, std::move(hosts), timeout, confirm, std::move(wire), {seed, most_delay}});
          }),
          py::arg("size"), py::kw_only(), py::arg("ranks_per_host") = 1, py::arg("hosts") = std::vector<int>(),
          py::arg("timeout") = std::chrono::minutes(5), py::arg("confirm") = false, py::arg("seed") = 0, py::arg("most_delay") = 0,
          py::arg("wire") = "", release_gil)
      .def("close", &VirtualWorld::close, release_gil)
      .def_property_readonly("groups", &VirtualWorld::groups)
      .def("progress", &VirtualWorld::progress, release_gil)
      .def_property_readonly("sent", [](const VirtualWorld& world) { return world.counts().sent; })
      .def_property_readonly("failures_told", [](const VirtualWorld& world) { return world.counts().failures_told; })
      .def("lose", &VirtualWorld::lose, py::arg("rank"), py::kw_only(), py::arg("noticed") = true, release_gil);
}

} // namespace fog

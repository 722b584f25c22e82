// The Python module fog_pg._C. fog_pg/_C.pyi describes its types.
#include <variant>

#include <c10/util/Logging.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/version.h>

#include "device/device_backends.hpp"
#include "windows/window_service.hpp"
#include "job/mpi_api.hpp"
#include "engine/process_engine.hpp"
#include "job/hosts.hpp"
#include "backend/protocol.hpp"
#include "backend/bindings.hpp"
#include "backend/given_timeout.hpp"
#include "job/mpi_runtime.hpp"
#include "core/neighbor_plan.hpp"
#include "core/settings.hpp"
#include "core/python_lock.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/window.hpp"

namespace py = pybind11;

namespace fog {

__attribute__((weak)) void bind_testing(py::module_& module); // in builds that contain testing/

} // namespace fog

namespace {

using fog::checked;
using fog::GivenTimeout;
using fog::NeighborPlan;
using fog::ProcessGroupFog;
using fog::Window;
using Timeout = std::optional<GivenTimeout>;
using Confirm = std::optional<bool>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// An argument that is a tensor or a list of tensors.
using Tensors = ProcessGroupFog::Tensors;
using OneOrMore = std::variant<at::Tensor, Tensors>;

Tensors as_list(OneOrMore given) {
  if (auto* tensor = std::get_if<at::Tensor>(&given)) {
    return {std::move(*tensor)};
  }
  return std::get<Tensors>(std::move(given));
}

std::optional<Tensors> as_list(std::optional<OneOrMore> given) {
  return given ? std::make_optional(as_list(std::move(*given))) : std::nullopt;
}

ProcessGroupFog::Compression compression_of(fog::BoundCodec codec, std::optional<OneOrMore> decoded, bool conserve) {
  return {std::move(codec), as_list(std::move(decoded)), conserve};
}

ProcessGroupFog::CallOptions call_options(std::string name, Confirm confirm, Timeout timeout, bool waits = false) {
  return {std::move(name), confirm, timeout ? std::make_optional(checked(*timeout)) : std::nullopt, waits};
}

std::vector<std::pair<int, double>> pairs_of(const std::vector<fog::WeightedPeer>& peers) {
  std::vector<std::pair<int, double>> pairs;
  for (const auto& peer : peers) {
    pairs.emplace_back(peer.rank, peer.weight);
  }
  return pairs;
}

// A method of the group that returns what the engine knows about its ranks.
auto ranks_by(std::vector<int> (fog::Engine::*find)(const fog::Group&)) {
  return [find](ProcessGroupFog& self) { return (self.group()->engine.*find)(*self.group()); };
}

// Lets Python's signal handlers run in a thread that waits without the GIL, so that Ctrl-C ends the wait.
void check_interrupt() {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

// A factory that calls a Python function. If the factory outlives the interpreter, the function is not released.
fog::DelegateFactory delegate_factory(py::function make) {
  const auto held = std::shared_ptr<py::function>(new py::function(std::move(make)), [](py::function* function) {
    if (Py_IsInitialized() == 0) {
      return;
    }
    const py::gil_scoped_acquire gil;
    delete function;
  });
  return [held](
             const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             const c10::intrusive_ptr<c10d::Backend::Options>& options, const at::Device& device, bool eager) {
    const py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, options, device, eager).cast<fog::BackendPtr>();
  };
}

void without_gil(const std::function<void()>& function) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) {
    function();
    return;
  }
  const py::gil_scoped_release released;
  function();
}

} // namespace

// Keep one argument per line.
// clang-format off
PYBIND11_MODULE(_C, module) {
  const py::call_guard<py::gil_scoped_release> release_gil;
  module.doc() = "The C++ part of the fog backend.";
  fog::process_engine().serve(std::make_unique<fog::WindowService>(fog::process_engine()));
  fog::process_engine().set_interrupt_check(check_interrupt);
  fog::set_python_lock(without_gil);

  module.attr("torch_version") = TORCH_VERSION;
#ifdef FOG_NATIVE_MPI
  module.attr("native_mpi") = true;
#else
  module.attr("native_mpi") = false;
#endif

  fog::bind_codecs(module);
  py::class_<NeighborPlan>(module, "NeighborPlan")
      .def(
          py::init<int, int, double, const std::vector<std::pair<int, double>>&, const std::vector<std::pair<int, double>>&, bool>(),
          py::arg("rank"),
          py::arg("size"),
          py::arg("self_weight"),
          py::arg("sources"),
          py::arg("destinations"),
          py::kw_only(),
          py::arg("mean") = false)
      .def_property_readonly("rank", &NeighborPlan::rank)
      .def_property_readonly("self_weight", &NeighborPlan::self_weight)
      .def_property_readonly("sources", [](const NeighborPlan& plan) { return pairs_of(plan.sources()); })
      .def_property_readonly("destinations", [](const NeighborPlan& plan) { return pairs_of(plan.destinations()); })
      .def("__repr__", &NeighborPlan::describe);

  py::module_::import("torch._C._distributed_c10d"); // registers the base classes
  auto group = py::class_<ProcessGroupFog, c10d::Backend, c10::intrusive_ptr<ProcessGroupFog>>(module, "ProcessGroupFog");

  py::class_<ProcessGroupFog::Options, c10d::Backend::Options, c10::intrusive_ptr<ProcessGroupFog::Options>>(group, "Options")
      .def(py::init<>())
      .def_readwrite("confirm", &ProcessGroupFog::Options::confirm)
      .def_readwrite("group_name", &ProcessGroupFog::Options::group_name)
      .def(
          "__deepcopy__",
          [](const ProcessGroupFog::Options& options, const py::dict&) {
            return c10::make_intrusive<ProcessGroupFog::Options>(options);
          },
          py::arg("memo"));

  group
      .def(
          py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<ProcessGroupFog::Options> options,
                      const c10::intrusive_ptr<ProcessGroupFog>& known, std::vector<int> known_ranks) {
            return c10::make_intrusive<ProcessGroupFog>(store, rank, size, std::move(options), known.get(), std::move(known_ranks));
          }),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"),
          py::arg("options"),
          py::arg("known") = py::none(),
          py::arg("known_ranks") = std::vector<int>(),
          release_gil)
      .def(
          "neighbor_allreduce",
          [](ProcessGroupFog& self, OneOrMore tensor, const NeighborPlan& plan, std::optional<OneOrMore> output, std::string name,
             Confirm confirm, Timeout timeout, fog::BoundCodec compression, std::optional<OneOrMore> decoded,
             bool conserve) -> WorkPtr {
            return self.neighbor_allreduce(
                as_list(std::move(tensor)), plan, as_list(std::move(output)), call_options(std::move(name), confirm, timeout),
                compression_of(std::move(compression), std::move(decoded), conserve));
          },
          py::arg("tensor"),
          py::arg("plan"),
          py::kw_only(),
          py::arg("output") = py::none(),
          py::arg("name") = "",
          py::arg("confirm") = py::none(),
          py::arg("timeout") = py::none(),
          py::arg("compression") = py::none(),
          py::arg("decoded") = py::none(),
          py::arg("conserve") = false,
          release_gil)
      .def( // without the arguments of a codec, which would take a fifth of the time of a small exchange
          "neighbor_allreduce_blocking",
          [](ProcessGroupFog& self, OneOrMore tensor, const NeighborPlan& plan, std::optional<OneOrMore> output, std::string name,
             Confirm confirm, Timeout timeout) -> Tensors {
            const auto work = self.neighbor_allreduce(
                as_list(std::move(tensor)), plan, as_list(std::move(output)), call_options(std::move(name), confirm, timeout, true), {});
            work->wait();
            return work->result();
          },
          py::arg("tensor"),
          py::arg("plan"),
          py::arg("output") = py::none(),
          py::arg("name") = "",
          py::arg("confirm") = py::none(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "hierarchical_neighbor_allreduce",
          [](ProcessGroupFog& self, OneOrMore tensor, std::vector<std::vector<int>> machines, const NeighborPlan& plan,
             std::optional<OneOrMore> output, std::string name, Confirm confirm, Timeout timeout, fog::BoundCodec compression,
             bool conserve) -> WorkPtr {
            return self.hierarchical_neighbor_allreduce(
                as_list(std::move(tensor)), std::move(machines), plan, as_list(std::move(output)),
                call_options(std::move(name), confirm, timeout), compression_of(std::move(compression), std::nullopt, conserve));
          },
          py::arg("tensor"),
          py::arg("machines"),
          py::arg("plan"),
          py::kw_only(),
          py::arg("output") = py::none(),
          py::arg("name") = "",
          py::arg("confirm") = py::none(),
          py::arg("timeout") = py::none(),
          py::arg("compression") = py::none(),
          py::arg("conserve") = false,
          release_gil)
      .def(
          "local_allreduce",
          [](ProcessGroupFog& self, at::Tensor tensor, std::vector<std::vector<int>> machines, const c10d::ReduceOp& op,
             std::string name, Timeout timeout) -> WorkPtr {
            return self.local_allreduce(tensor, std::move(machines), op, call_options(std::move(name), std::nullopt, timeout));
          },
          py::arg("tensor"),
          py::arg("machines"),
          py::arg("op"),
          py::kw_only(),
          py::arg("name") = "",
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "neighbor_allgather",
          [](ProcessGroupFog& self, const at::Tensor& tensor, const NeighborPlan& plan, std::string name, Confirm confirm,
             Timeout timeout) -> WorkPtr {
            return self.neighbor_allgather(tensor, plan, call_options(std::move(name), confirm, timeout));
          },
          py::arg("tensor"),
          py::arg("plan"),
          py::kw_only(),
          py::arg("name") = "",
          py::arg("confirm") = py::none(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "allgather_concat",
          [](ProcessGroupFog& self, const at::Tensor& tensor, std::string name, Confirm confirm, Timeout timeout) -> WorkPtr {
            return self.allgather_concat(tensor, call_options(std::move(name), confirm, timeout));
          },
          py::arg("tensor"),
          py::kw_only(),
          py::arg("name") = "",
          py::arg("confirm") = py::none(),
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "agree",
          [](ProcessGroupFog& self, at::Tensor sums, std::string name) -> WorkPtr {
            return self.agree(sums, call_options(std::move(name), std::nullopt, std::nullopt, true));
          },
          py::arg("sums"),
          py::kw_only(),
          py::arg("name") = "",
          release_gil)
      .def(
          "allreduce_named",
          [](ProcessGroupFog& self, at::Tensor tensor, const c10d::ReduceOp& op, std::string name, Timeout timeout) -> WorkPtr {
            return self.allreduce_named(tensor, op, call_options(std::move(name), std::nullopt, timeout));
          },
          py::arg("tensor"),
          py::arg("op"),
          py::kw_only(),
          py::arg("name") = "",
          py::arg("timeout") = py::none(),
          release_gil)
      .def(
          "broadcast_named",
          [](ProcessGroupFog& self, at::Tensor tensor, int root, std::string name, Timeout timeout) -> WorkPtr {
            return self.broadcast_named(tensor, root, call_options(std::move(name), std::nullopt, timeout));
          },
          py::arg("tensor"),
          py::arg("root"),
          py::kw_only(),
          py::arg("name") = "",
          py::arg("timeout") = py::none(),
          release_gil)
      // new_group calls it on ranks outside of a new group, if the backend can split and is bound to a device.
      .def(
          "perform_nocolor_split",
          [](ProcessGroupFog&, const at::Device&) {},
          py::arg("device"))
      .def_property_readonly("sent", [](ProcessGroupFog& self) { return self.group()->engine.sent(self.group()); })
      .def_property_readonly(
          "options",
          [](ProcessGroupFog& self) {
            return c10::static_intrusive_pointer_cast<ProcessGroupFog::Options>(self.getBackendOptions());
          })
      .def(
          "delegate",
          [](ProcessGroupFog& self, const std::string& device_type) {
            fog::process_engine().check_not_forked();
            return self.delegate(device_type);
          },
          py::arg("device_type"))
      .def(
          "part",
          &ProcessGroupFog::part,
          py::arg("ranks"),
          py::arg("number"),
          py::arg("store"),
          py::arg("options"),
          release_gil)
      .def("watch", &ProcessGroupFog::watch, py::arg("ranks"), release_gil)
      .def_property_readonly("id", [](ProcessGroupFog& self) { return self.group()->id; })
      .def_property_readonly("failure", [](ProcessGroupFog& self) { return self.group()->engine.failure(self.group()).reason; })
      .def_property_readonly("local_ranks", &ProcessGroupFog::local_ranks)
      .def_property_readonly("hosts", &ProcessGroupFog::hosts)
      .def("transport", &ProcessGroupFog::transport, py::arg("rank"), release_gil)
      .def("lost_ranks", ranks_by(&fog::Engine::lost_ranks), release_gil)
      .def("silent_ranks", ranks_by(&fog::Engine::silent_ranks), release_gil)
      .def("left_ranks", ranks_by(&fog::Engine::left_ranks), release_gil)
      .def("suspect_ranks", ranks_by(&fog::Engine::suspect_ranks), release_gil)
      .def_property(
          "lost_after",
          [](ProcessGroupFog& self) { return std::chrono::duration<double>(self.group()->engine.lost_after()).count(); },
          &ProcessGroupFog::set_lost_after);

  fog::bind_windows(module, group);
  fog::bind_observation(module, group);

  module.def(
      "empty_shared",
      [](const std::vector<int64_t>& sizes, const py::object& dtype) {
        TORCH_CHECK_TYPE(THPDtype_Check(dtype.ptr()), "dtype: got ", py::str(py::type::of(dtype)).cast<std::string>(), "; allowed is a torch.dtype");
        return fog::empty_shared(sizes, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
      },
      py::arg("sizes"),
      py::arg("dtype"));
  module.def("share", &fog::share, py::arg("tensor"));
  module.def("is_shared", &fog::is_shared, py::arg("tensor"));
  fog::bind_joining(module);
  if (fog::bind_testing != nullptr) {
    fog::bind_testing(module);
  }
  module.def(
      "set_delegate_factory",
      [](const std::string& device_type, std::optional<py::function> make) {
        fog::set_delegate_factory(at::Device(device_type).type(), make ? delegate_factory(std::move(*make)) : nullptr);
      },
      py::arg("device_type"),
      py::arg("make"));
  module.def("choose_mpi", &fog::choose, py::arg("path"));
  module.def("load_mpi", &fog::load);
  module.def(
      "set_version",
      [](const std::string& version) {
        fog::set_version(version);
        fog::set_protocol(fog::protocol());
      },
      py::arg("version"));
  module.def("mpi_version", &fog::library_version);
  py::class_<fog::Settings>(module, "Settings")
      .def(py::init())
      .def_readwrite("between_hosts", &fog::Settings::between_hosts)
      .def_readwrite("interface", &fog::Settings::interface)
      .def_readwrite("job_secret", &fog::Settings::job_secret)
      .def_readwrite("timeline", &fog::Settings::timeline)
      .def_readwrite("local_links", &fog::Settings::local_links)
      .def_readwrite("connections", &fog::Settings::connections)
      .def_readwrite("rma_bytes", &fog::Settings::rma_bytes)
      .def_readwrite("host_timeout", &fog::Settings::host_timeout)
      .def_readwrite("warn_after", &fog::Settings::warn_after)
      .def_readwrite("lost_after", &fog::Settings::lost_after)
      .def_readwrite("max_ranks", &fog::Settings::max_ranks)
      .def_readwrite("local_ranks", &fog::Settings::local_ranks)
      .def_readwrite("launcher_size", &fog::Settings::launcher_size)
      .def_readwrite("launcher_rank", &fog::Settings::launcher_rank);
  module.def("set_settings", &fog::set_settings, py::arg("settings"));
  module.def(
      "start_from_launcher",
      [](GivenTimeout timeout) {
        fog::process_engine().check_not_forked();
        auto& runtime = fog::Runtime::instance();
        runtime.start_from_launcher(checked(timeout));
        return std::make_pair(runtime.rank(), runtime.size());
      },
      py::arg("timeout"),
      release_gil);
  module.def(
      "broadcast_from_rank_zero",
      [](const std::string& text, GivenTimeout timeout) {
        fog::process_engine().check_not_forked();
        return fog::Runtime::instance().broadcast(text, checked(timeout));
      },
      py::arg("text"),
      py::arg("timeout"),
      release_gil);
  module.def(
      "suspend_detection", [](bool on) { fog::process_engine().suspend_judgement(on); }, py::arg("on"),
      release_gil);
  module.def("init_logging", &c10::initLogging);
  module.def("shutdown", [] { fog::leave_job(); }, release_gil);
}

#include "backend/bindings.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "core/deadline.hpp"
#include "engine/joining.hpp"
#include "engine/process_engine.hpp"
#include "job/mpi_runtime.hpp"
#include "job/peer_information.hpp"
#include "job/peer_sockets.hpp"
#include "job/rendezvous.hpp"
#include "job/secret.hpp"

namespace py = pybind11;

namespace fog {
namespace {

// Returns the text of a message about the job's members after a check.
std::string_view checked_message(int64_t epoch, const py::bytes& payload) {
  const auto text = static_cast<std::string_view>(payload);
  TORCH_CHECK_VALUE(epoch >= 0, "epoch: got ", epoch, "; allowed is 0 or more");
  TORCH_CHECK_VALUE(
      text.size() <= OfMembership::kMostBytes, "payload: got ", text.size(), " bytes; allowed are at most ", OfMembership::kMostBytes);
  return text;
}

bool send_membership(int rank, int64_t epoch, const py::bytes& payload) {
  const auto text = checked_message(epoch, payload);
  const auto& runtime = Runtime::instance();
  const int end = std::max(runtime.size(), runtime.max_ranks());
  TORCH_CHECK_VALUE(
      rank >= 0 && (!runtime.joined() || (rank < end && rank != runtime.rank())), "rank: got ", rank,
      "; allowed are the job's ranks other than this one, from 0 to below ", end);
  const py::gil_scoped_release no_gil;
  return process_engine().send_membership(rank, static_cast<uint64_t>(epoch), text);
}

std::vector<std::pair<int, py::bytes>> take_membership() {
  std::vector<MembershipMail::Message> messages;
  {
    const py::gil_scoped_release no_gil;
    messages = process_engine().take_membership();
  }
  return {messages.begin(), messages.end()};
}

bool wait_membership(double timeout_s) {
  constexpr double kMost = 1e9; // 32 years
  TORCH_CHECK_VALUE(timeout_s >= 0, "timeout_s: got ", timeout_s, "; allowed are 0 seconds or more");
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(std::min(timeout_s, kMost)));
  return process_engine().wait_membership(deadline_after(timeout));
}

void answer_membership(int64_t epoch, const py::bytes& payload) {
  std::string text(checked_message(epoch, payload));
  const py::gil_scoped_release no_gil;
  process_engine().answer_membership(static_cast<uint64_t>(epoch), std::move(text));
}

} // namespace

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
  module.def("send_membership", &send_membership, py::arg("rank"), py::arg("epoch"), py::arg("payload"));
  module.def("take_membership", &take_membership);
  module.def("wait_membership", &wait_membership, py::arg("timeout_s"), release_gil);
  module.def("answer_membership", &answer_membership, py::arg("epoch"), py::arg("payload"));
  module.def("connect_with", &connect_with, py::arg("entries"), py::arg("is_member"), py::arg("timeout"), release_gil);
}

} // namespace fog

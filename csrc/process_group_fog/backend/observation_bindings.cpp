#include "backend/bindings.hpp"

#include <pybind11/stl.h>

#include "core/timeline.hpp"
#include "engine/flight_record.hpp"
#include "engine/process_engine.hpp"
#include "job/mpi_runtime.hpp"

namespace py = pybind11;

namespace fog {
namespace {

using Seconds = std::chrono::duration<double>;

py::dict read_flight_record(int pid) {
  const auto process = FlightRecord::read(pid);
  py::dict result = py::cast(process.fields);
  result["operations"] = process.operations;
  result["peers"] = process.peers;
  return result;
}

py::dict traffic_of(ProcessGroupFog& self) {
  py::dict result;
  for (const auto& [peer, traffic] : self.group()->engine.traffic(self.group())) {
    py::dict values;
    values["sent_messages"] = traffic.sent_messages;
    values["sent_bytes"] = traffic.sent_bytes;
    values["received_messages"] = traffic.received_messages;
    values["received_bytes"] = traffic.received_bytes;
    values["waited"] = Seconds(traffic.waited).count();
    values["waited_last"] = Seconds(traffic.waited_last).count();
    result[py::int_(peer)] = values;
  }
  return result;
}

} // namespace

void bind_observation(py::module_& module, GroupClass& group) {
  group.def_property_readonly("traffic", traffic_of);
  module.def(
      "start_timeline", [](const std::string& prefix, int rank, int size) { start_timeline(prefix, rank, size); }, py::arg("prefix"),
      py::arg("rank"), py::arg("size"));
  module.def("stop_timeline", &stop_timeline, py::call_guard<py::gil_scoped_release>());
  module.def("timeline_path", [] { return Timeline::instance().path(); });
  module.def("timeline_is_on", [] { return Timeline::is_on(); });
  module.def(
      "add_to_timeline",
      [](const std::string& track, const std::string& name, int64_t begin, int64_t end) {
        using Time = Timeline::Clock::time_point;
        const auto at = [](int64_t time) { return Time(std::chrono::duration_cast<Time::duration>(std::chrono::nanoseconds(time))); };
        Timeline::instance().add_span(track, name, at(begin), at(end));
      },
      py::arg("track"), py::arg("name"), py::arg("begin"), py::arg("end"));
  module.def("observe_as", &observe_as, py::arg("rank"), py::arg("size"), py::arg("script"));
  module.def("observe", [](bool on) { process_engine().observe(on); }, py::arg("on"));
  module.def("note_step", &FlightRecord::note_step);
  module.def("note_job", &FlightRecord::note_job, py::arg("job"));
  module.def("note_epoch", &FlightRecord::note_epoch, py::arg("epoch"));
  module.def(
      "note_staleness",
      [](const std::vector<std::pair<int, int64_t>>& exchanges) {
        for (const auto& [rank, count] : exchanges) {
          FlightRecord::note_staleness(rank, count);
        }
      },
      py::arg("exchanges"));
  module.def("read_flight_record", read_flight_record, py::arg("pid"));
}

} // namespace fog

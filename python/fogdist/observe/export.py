"""Shows the numbers of a running job to Prometheus (OpenMetrics) and to OpenTelemetry.

exporter = fogdist.metrics.Exporter(port=9400)  # rank r of this host is served on port 9400 + r

The numbers are read when somebody asks for them: those of the flight record, which a process counts in any case, the
bytes of each link, which are counted while an exporter is open, and the last consensus distance. prometheus_client and
opentelemetry-api are imported when the first exporter that uses them is made.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fog_pg import _extension
from fog_pg._known import backend_of
from fogdist import consensus
from fogdist.context import Context, current
from fogdist.observe import flight_record

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from opentelemetry.metrics import CallbackOptions, Observation
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

_log = logging.getLogger("fogdist")

# Prometheus' words for the units that are part of a name there; those in braces are not.
_UNITS = {"s": "seconds", "By": "bytes"}

# Numbers by the values of their labels besides "rank".
_Samples = dict[tuple[str, ...], float]


class Metric(NamedTuple):
    """One number, or one for each peer, that an exporter shows.

    Attributes:
        name: The name for OpenTelemetry.
        unit: The unit in the code of UCUM, as OpenTelemetry has it.
        is_counter: Whether the number only grows; else it is a gauge.
        labels: The labels besides "rank".
        description: What it says.
    """

    name: str
    unit: str
    is_counter: bool
    labels: tuple[str, ...]
    description: str

    @property
    def prometheus_name(self) -> str:
        """The name that OpenTelemetry's translation for Prometheus gives it, without the "_total" of a counter."""
        return "_".join(filter(None, [self.name.replace(".", "_"), _UNITS.get(self.unit)]))


METRICS = (
    Metric("fog.steps", "{step}", True, (), "Steps of fog's optimizers and wrappers."),
    Metric("fog.operations", "{operation}", True, (), "Operations begun."),
    Metric("fog.operation.failures", "{operation}", True, (), "Operations that have failed."),
    Metric("fog.wait.time", "s", True, ("peer",), "Time in which only this peer's message was missing."),
    Metric("fog.link.io", "By", True, ("peer", "direction"), "Data of operations and windows."),
    Metric("fog.staleness", "{exchange}", False, ("peer",), "How many exchanges old this peer's values are."),
    Metric("fog.peer.lost", "", False, ("peer",), "1 if this peer is lost, else 0."),
    Metric("fog.membership.epoch", "{change}", False, (), "How often the ranks that take part have changed."),
    Metric("fog.consensus.distance", "", False, (), "The consensus distance when it was last computed."),
)


class Exporter:
    """Exports the numbers of this process, in one of three ways; each rank makes an exporter of its own.

    Without an exporter nothing is imported, counted or served. While one is open, each operation reads the clock when
    it begins and when a message arrives, as with `Metrics`.

    Args:
        port: Serves OpenMetrics, or Prometheus' text format if a client asks for that, by HTTP on this port plus the
            number of lower ranks on this host. A daemon thread answers, to anybody, and nothing is encrypted. 0 takes
            any free port. Needs the package prometheus_client.
        file: Writes Prometheus' text format, for the textfile collector of node_exporter, now and at each `write`. The
            file name is `file`, the rank and ".prom"; an existing file is replaced, in one step. A `file` that ends in a
            separator is a folder, which must exist. Needs the package prometheus_client.
        opentelemetry: Makes instruments of OpenTelemetry's global meter provider, which reads them when it exports.
            Needs the package opentelemetry-api, and the SDK that the program has set up; without one nothing is read.
        address: The address on which the port is served, by default on all of this host's.

    Attributes:
        port: The port of this rank; None without one.
        path: The file of this rank; None without one.

    Raises:
        TypeError: An argument has another type.
        ValueError: None or several of `port`, `file` and `opentelemetry` are given; the port is out of range or taken; the
            file cannot be written; before `fogdist.init`.
        ImportError: The package is not installed.
        RuntimeError: After `fogdist.shutdown`.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        file: str | os.PathLike[str] | None = None,
        opentelemetry: bool = False,
        address: str = "0.0.0.0",
    ) -> None:
        _check(port, file, opentelemetry, address)
        context = current()
        self.port: int | None = None
        self.path: Path | None = None
        self._rank = str(flight_record.read(os.getpid()).rank)
        self._server: WSGIServer | None = None
        # The bytes by peer and direction of each group; groups that have ended stay here, as a counter never falls.
        self._links: dict[int, dict[tuple[str, ...], int]] = {}
        # Held while numbers are read, so that none are after `close`, nor at the end of the interpreter.
        self._lock = threading.Lock()
        self._is_open = True
        if port is not None:
            self._serve(port and port + _place_on_host(context), address)
        elif file is not None:
            self.path = Path(f"{os.fspath(file)}{self._rank}.prom")
            try:
                self._write()
            except OSError as error:
                raise ValueError(f"file must be one that can be written, got {self.path}: {error}") from error
        else:
            self._make_instruments()
        _extension.load().observe(True)
        atexit.register(self._end)
        _exporters.add(self)

    def write(self) -> None:
        """Writes the file anew. If that fails, for example on a full disk, it logs a warning.

        Raises:
            RuntimeError: The exporter has no file, or is closed.
        """
        if self.path is None or not self._is_open:
            raise RuntimeError("write() needs an exporter with file= that is not closed")
        try:
            self._write()
        except OSError as error:
            _log.warning("the metrics could not be written: %s", error)

    def close(self) -> None:
        """Ends the export: frees the port, and removes the file, as the end of the program does too."""
        self._end()
        atexit.unregister(self._end)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        if not self._is_open:
            return
        with self._lock:
            self._is_open = False
        _extension.load().observe(False)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, _Samples]:
        """Returns the samples by the metric's name, by the labels besides "rank"; none after `close`."""
        with self._lock:
            if not self._is_open:
                return {}
            process, distance = flight_record.read(os.getpid()), consensus.latest
            by_rank = {(str(peer.rank),): peer for peer in process.peers}
            staleness = {rank: peer.staleness for rank, peer in by_rank.items() if not peer.lost}
            return {
                "fog.steps": {(): process.steps},
                "fog.operations": {(): process.begun},
                "fog.operation.failures": {(): process.failed},
                "fog.wait.time": {rank: peer.waited for rank, peer in by_rank.items()},
                "fog.link.io": self._read_links(),
                "fog.staleness": {rank: age for rank, age in staleness.items() if age >= 0},
                "fog.peer.lost": {rank: int(peer.lost) for rank, peer in by_rank.items()},
                "fog.membership.epoch": {(): max(process.epoch, 0)},
                "fog.consensus.distance": {} if distance is None else {(): distance},
            }

    def _read_links(self) -> _Samples:
        for group, places in list(distributed_c10d._world.pg_group_ranks.items()):
            # Of groups without this rank, torch keeps a number.
            backend = backend_of(group) if isinstance(group, dist.ProcessGroup) else None
            # The ranks of a group with torch's enable_reconfigure may be others by now.
            if backend is None or getattr(backend, "supports_reconfigure", False):
                continue
            ranks = {place: str(rank) for rank, place in places.items()}
            samples = self._links[backend.id] = {}
            for place, numbers in backend.traffic.items():
                samples[ranks[place], "transmit"] = int(numbers["sent_bytes"])
                samples[ranks[place], "receive"] = int(numbers["received_bytes"])
        total = Counter[tuple[str, ...]]()
        for samples in self._links.values():
            total.update(samples)
        return dict(total)

    def collect(self) -> Iterator[Family]:
        """Yields the metrics for prometheus_client, which calls it when they are scraped."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        read = self._read()
        for metric in METRICS:
            make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            labels, unit = ("rank", *metric.labels), _UNITS.get(metric.unit, "")
            family = make(metric.prometheus_name, metric.description, labels=labels, unit=unit)
            for values, number in read.get(metric.name, {}).items():
                family.add_metric((self._rank, *values), number)
            yield family

    def _registry(self, argument: str) -> CollectorRegistry:
        registry: CollectorRegistry = _package("prometheus_client", argument).CollectorRegistry()
        registry.register(self)
        return registry

    def _serve(self, port: int, address: str) -> None:
        registry = self._registry("port")
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port must be free on {address}, got {port}: {error}") from error
        self.port = self._server.server_port

    def _write(self) -> None:
        registry = self._registry("file")
        from prometheus_client import write_to_textfile

        write_to_textfile(str(self.path), registry)

    def _make_instruments(self) -> None:
        meter = _package("opentelemetry.metrics", "opentelemetry").get_meter("fogdist")
        for metric in METRICS:
            make = meter.create_observable_counter if metric.is_counter else meter.create_observable_gauge
            make(metric.name, [functools.partial(self._observe, metric)], metric.unit, metric.description)

    def _observe(self, metric: Metric, _: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        for values, number in self._read().get(metric.name, {}).items():
            labels = dict(zip(metric.labels, values, strict=True))
            yield Observation(number, {"rank": self._rank, **labels})


def _check(port: object, file: object, opentelemetry: object, address: object) -> None:
    if port is not None and (not isinstance(port, int) or isinstance(port, bool)):
        raise TypeError(f"port must be an int, got {type(port).__name__}")
    if file is not None and not isinstance(file, (str, os.PathLike)):
        raise TypeError(f"file must be a str or a path, got {type(file).__name__}")
    if not isinstance(opentelemetry, bool):
        raise TypeError(f"opentelemetry must be a bool, got {type(opentelemetry).__name__}")
    if not isinstance(address, str):
        raise TypeError(f"address must be a str, got {type(address).__name__}")
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    is_given = {"port": port is not None, "file": file is not None, "opentelemetry": opentelemetry}
    if sum(is_given.values()) != 1:
        given = " and ".join(name for name, is_there in is_given.items() if is_there)
        raise ValueError(f"one of port, file and opentelemetry must be given, got {given or 'none'}")


def _package(module: str, argument: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = "opentelemetry-api" if argument == "opentelemetry" else module
        raise ImportError(
            f"{argument} needs the package {name}, which cannot be imported: {error}"
        ) from error


def _place_on_host(context: Context) -> int:
    hosts, rank = context.backend.hosts, context.rank
    joined_before = max(
        0, rank - len(hosts)
    )  # of a rank that the job did not begin with, whose host is not known
    return hosts[:rank].count(hosts[context.viewpoint]) + joined_before


_exporters: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _leave_in_child() -> None:
    """Leaves port and file to the parent of a forked process, such as a worker of a data loader.

    Such a worker lives on for seconds when its parent is killed. The port would be taken as long.
    """
    for exporter in _exporters:
        exporter._is_open = False
        if exporter._server is not None:
            exporter._server.socket.close()


os.register_at_fork(after_in_child=_leave_in_child)

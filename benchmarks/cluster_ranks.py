"""What a rank of benchmarks/cluster.py does: an emulated accelerator, a model on it, and the ways to train together."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import torch
import torch.distributed as dist
from emulated_hosts import INTERFACE, address, emulated_hosts, missing, move_to_host
from fogdist import algorithms, topology
from fogdist.packing import cap_bytes
from fogdist.training.buckets import FlatBuckets
from forked_ranks import ForkedWorld, die_with_parent, keep_store, obey
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import (
    DDP_CAP_MB,
    FLOAT_BYTES,
    FOG_CAP_MB,
    FORWARD_SHARE,
    MODELS,
    Dilation,
    bucket_bytes,
    ddp_buckets,
    sizes_of,
)

# In which ranks go at their own pace, and may make different numbers of steps.
ASYNCHRONOUS = {"none", "async_win", "win_put", "async_gossip"}
# Whose exchanges come every `local_steps` steps only.
LOCAL = {"local_sgd", "gossip_diloco"}
# Peers of a rank in a round of the Base graph: Base-(k + 1).
BASE_DEGREE = 2
PORT = 29620
# By so much ranks go before other programs of the machine, which would take cores that accelerators do not need.
PRIORITY = 10
# An accelerator that is ready by then is not waited for before the last layer: each sleep takes some of the CPU.
NAP = 1.5e-3
PING_BYTES, PINGS = 64, 200


@dataclass(frozen=True)
class Job:
    """What all ranks of a world are told.

    Attributes:
        model: A key of MODELS.
        dilation: Of the world.
        compute: Emulated seconds of a step.
        local_steps: Of the ways that have them.
        grouped: Real local steps that one of those ways' steps stands for, with as many times the compute.
        centers: Data centers.
        ranks_per_host: Consecutive ranks that share a host.
        slow: By host, by what its compute is multiplied.
        slow_link: Host whose link is slow.
        pause_probability: Of a step of any rank, to stand still for as long as it computes.
        seed: Of these draws.
        timeout: Seconds, of the groups.
    """

    model: str
    dilation: Dilation
    compute: float
    local_steps: int = 8
    grouped: int = 1
    centers: int = 1
    ranks_per_host: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_link: int | None = None
    pause_probability: float = 0.0
    seed: int = 0
    timeout: float = 120.0


class Device:
    """An accelerator that works on what it is given, one after the other, while the host goes on."""

    def __init__(self) -> None:
        self.ready = 0.0

    def begin(self, pause: float) -> None:
        """A pass begins: the host has waited for what was before."""
        self.ready = time.perf_counter() + pause

    def compute(self, seconds: float) -> None:
        """Is given work."""
        self.ready += seconds

    def wait(self, nap: float = 0.0) -> None:
        """Waits until it is done, unless that is less than `nap` seconds away."""
        left = self.ready - time.perf_counter()
        if left > nap:
            time.sleep(left)


class _Compute(torch.autograd.Function):
    """The identity, while the accelerator computes a layer; its parameters get constant gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        layer.device.compute(FORWARD_SHARE * layer.seconds)
        if layer.is_last:
            layer.device.wait()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.device.compute((1 - FORWARD_SHARE) * layer.seconds)
        layer.device.wait(0.0 if layer.is_first else NAP)
        return (gradients[0], None, *layer.gradients)


class EmulatedLayer(nn.Module):
    """Parameters of given sizes, and the time that the accelerator needs for them."""

    def __init__(
        self, sizes: Sequence[int], seconds: float, device: Device, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(size) for size in sizes])
        self.gradients = [torch.full((size,), 1e-3) for size in sizes]
        self.seconds, self.device, self.is_first, self.is_last = seconds, device, is_first, is_last

    def forward(self, x: Tensor) -> Tensor:
        """Computes."""
        result: Tensor = _Compute.apply(x, self, *self.weights)  # type: ignore[no-untyped-call]
        return result


def emulated_model(job: Job, device: Device, slowness: float) -> nn.Sequential:
    """The job's model, on an accelerator that is so many times slower."""
    model = MODELS[job.model]
    sizes = iter(sizes_of(model, job.dilation))
    last = len(model.layers) - 1
    return nn.Sequential(
        *(
            EmulatedLayer(
                [next(sizes) for _ in layer.sizes],
                slowness * share * job.compute,
                device,
                is_first=place == 0,
                is_last=place == last,
            )
            for place, (layer, share) in enumerate(zip(model.layers, model.shares, strict=True))
        )
    )


@dataclass
class Trainer:
    """A way, made.

    Attributes:
        module: Called as a function.
        optimizer: Stepped after the backward pass.
        prepare: Called before step t.
        stand_still: Called when other ways have their turn: no rank is to wait for this one.
        steps: Made so far.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    prepare: Callable[[int], None] = lambda t: None
    stand_still: Callable[[], None] = lambda: None
    steps: int = 0


class HostRank:
    """A rank on an emulated host; the parent calls its methods by name."""

    def __init__(self, rank: int, size: int, limit: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timedelta(seconds=limit)

    def start(self) -> None:
        """Joins the others."""
        store = dist.TCPStore(address(0), PORT, is_master=False, timeout=self.timeout)
        dist.init_process_group(
            "fog", store=store, rank=self.rank, world_size=self.size, timeout=self.timeout
        )
        fogdist.init()

    def leave(self) -> None:
        """Meets the others before the end."""
        dist.barrier()


class ClusterRank(HostRank):
    """A rank of an emulated cluster."""

    def __init__(self, rank: int, size: int, job: Job) -> None:
        super().__init__(rank, size, job.timeout)
        self.job = job
        host = rank // job.ranks_per_host
        self.device = Device()
        self.slowness = job.slow.get(host, 1.0)
        self.trainers: dict[str, Trainer] = {}
        self.gloo: dist.ProcessGroup | None = None
        self.x = torch.ones(1)

    def start(self) -> None:
        """Joins the others."""
        super().start()
        self.gloo = dist.new_group(backend="gloo", timeout=self.timeout)
        if self.job.ranks_per_host > 1:
            machines = self.size // self.job.ranks_per_host
            fogdist.set_machine_topology(topology.by_name("exp2", machines))
        dist.barrier()

    def latency(self) -> float:
        """Seconds that a small message takes from the first rank to the last one, by TCP alone; 0 on others."""
        if self.rank == 0:
            server = socket.create_server((address(0), PORT + 1))
        dist.barrier()
        if self.rank == 0:
            with server:
                connection, _ = server.accept()
        elif self.rank == self.size - 1:
            connection = socket.create_connection((address(0), PORT + 1), self.job.timeout)
        else:
            return 0.0
        times = []
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                begin = time.perf_counter()
                if self.rank == 0:
                    connection.recv(PING_BYTES, socket.MSG_WAITALL)
                    connection.sendall(bytes(PING_BYTES))
                else:
                    connection.sendall(bytes(PING_BYTES))
                    connection.recv(PING_BYTES, socket.MSG_WAITALL)
                times.append(time.perf_counter() - begin)
        return sorted(times)[len(times) // 2] / 2

    def make(self, way: str) -> list[int]:
        """Sets a way up; collective. Returns the bytes of its buckets, in the order in which they leave."""
        grouped = self.job.grouped if way in LOCAL else 1
        model = emulated_model(self.job, self.device, grouped * self.slowness)
        self.trainers[way] = self._trainer(way, model)
        sizes, dilation = sizes_of(MODELS[self.job.model], self.job.dilation), self.job.dilation
        if way == "none":
            return []
        if way.startswith("ddp_"):
            return bucket_bytes(sizes, ddp_buckets(sizes, dilation.cap_mb(DDP_CAP_MB)))
        tensors = [torch.empty(size) for size in sizes]
        flats = FlatBuckets(tensors, cap_bytes(dilation.cap_mb(FOG_CAP_MB))).flats
        return [FLOAT_BYTES * flat.numel() for flat in flats]

    def run(self, way: str, steps: int, seconds: float | None = None) -> dict[str, float]:
        """Makes one step, and then so many more; or as many more as begin within so many seconds.

        Returns:
            When the first step had ended, when the last one ended, how many came after the first one, and for how many
            steps values were sent.
        """
        trainer = self.trainers[way]
        period = self.job.local_steps if way in LOCAL else 1
        exchanges = trainer.steps // period
        self._step(trainer)
        begin, made = time.perf_counter(), 0
        while made < steps if seconds is None else time.perf_counter() - begin < seconds:
            self._step(trainer)
            made += 1
        end = time.perf_counter()
        trainer.stand_still()
        sent = period * (trainer.steps // period - exchanges)
        return {"begin": begin, "end": end, "steps": made, "sent": sent}

    # --- inside ---

    def _step(self, trainer: Trainer) -> None:
        t = trainer.steps
        trainer.prepare(t)
        trainer.optimizer.zero_grad()
        pause = 0.0
        if self.job.pause_probability:
            # In step t of a rank the same in all ways.
            draw = random.Random(f"{self.job.seed} {self.rank} {t}").random()
            pause = self.job.compute if draw < self.job.pause_probability else 0.0
        self.device.begin(pause)
        loss = trainer.module(self.x).sum()
        self.device.begin(max(0.0, self.device.ready - time.perf_counter()))
        loss.backward()
        trainer.optimizer.step()
        trainer.steps += 1

    def _trainer(self, way: str, model: nn.Module) -> Trainer:
        size, job = self.size, self.job
        fog_cap = job.dilation.cap_mb(FOG_CAP_MB)

        def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

        def ddp(group: dist.ProcessGroup | None) -> Trainer:
            module = DistributedDataParallel(
                model, process_group=group, bucket_cap_mb=job.dilation.cap_mb(DDP_CAP_MB)
            )
            return Trainer(module, sgd(model.parameters()))

        def wrapped(graphs: Any, mode: Any = "sync") -> Trainer:
            module = fogdist.DecentralizedDataParallel(model, sgd, graphs, mode, bucket_cap_mb=fog_cap)
            still = module.pause if mode == "async" else lambda: None
            return Trainer(module, module.optimizer, stand_still=still)

        def algorithm(make: Callable[..., Any], **options: Any) -> Trainer:
            return Trainer(model, make(sgd(model.parameters()), model, bucket_cap_mb=fog_cap, **options))

        def async_gossip() -> Trainer:
            # Its neighbors are those of the group's topology, whose edges must go both ways.
            before = fogdist.load_topology()
            fogdist.set_topology(topology.by_name("ring", size))
            trainer = algorithm(algorithms.AsynchronousGossip)
            fogdist.set_topology(before)
            return trainer

        def gossip_diloco() -> Trainer:
            if job.centers == 1:
                return algorithm(algorithms.GASLoC, local_steps=job.local_steps)
            # One rank of each center talks to the next center in a round.
            rounds = topology.inner_outer_exponential(size, size // job.centers)
            return algorithm(algorithms.DiLoCo, topology=rounds, local_steps=job.local_steps)

        def hierarchical() -> Trainer:
            kind = bf.CommunicationType.hierarchical_neighbor_allreduce
            trainer = algorithm(bf.DistributedAdaptWithCombineOptimizer, communication_type=kind)
            return self._dynamic(trainer, is_of_machines=True)

        one_peer = topology.one_peer_exponential
        ways: dict[str, Callable[[], Trainer]] = {
            "none": lambda: Trainer(model, sgd(model.parameters())),
            "ddp_gloo": lambda: ddp(self.gloo),
            "ddp_fog": lambda: ddp(None),
            "one_peer_exp": lambda: wrapped(one_peer(size)),
            "sites": lambda: wrapped(topology.by_sites([rank * job.centers // size for rank in range(size)])),
            "static_exp": lambda: wrapped(topology.by_name("exp2", size)),
            "base_k": lambda: wrapped(topology.base_graph(size, BASE_DEGREE)),
            "async_win": lambda: wrapped(one_peer(size), "async"),
            "local_sgd": lambda: algorithm(algorithms.LocalSGD, local_steps=job.local_steps),
            "win_put": lambda: self._dynamic(algorithm(bf.DistributedWinPutOptimizer)),
            "async_gossip": async_gossip,
            "gossip_diloco": gossip_diloco,
            "hierarchical": hierarchical,
        }
        return ways[way]()

    def _dynamic(self, trainer: Trainer, *, is_of_machines: bool = False) -> Trainer:
        """One peer a step, told to the optimizer before it."""
        per_host = self.job.ranks_per_host if is_of_machines else 1
        rounds = topology.one_peer_exponential(self.size // per_host)
        optimizer: Any = trainer.optimizer

        def prepare(t: int) -> None:
            peers = rounds.peers(self.rank // per_host, t)
            if is_of_machines:
                optimizer.self_weight = peers["self_weight"]
                optimizer.src_machine_weights = peers["src_weights"]
                optimizer.dst_machine_weights = peers["dst_weights"]
            else:
                optimizer.dst_weights = dict.fromkeys(peers["dst_weights"], 1.0)

        trainer.prepare = prepare
        return trainer


def prefer() -> None:
    """Gives this process a higher priority, in a session of its own, as the kernel may count it within a session only."""
    os.setsid()
    os.nice(-PRIORITY)
    with contextlib.suppress(OSError):  # not there, or off
        Path("/proc/self/autogroup").write_text(str(-PRIORITY))


def core_time() -> tuple[float, float]:
    """Returns the time of all cores so far, in ticks: that in which nothing ran, and all."""
    _, *fields = Path("/proc/stat").read_text().splitlines()[0].split()[:9]
    _, _, _, idle, waiting, *_ = times = [float(each) for each in fields]
    return idle + waiting, sum(times)


def idle_since(before: tuple[float, float]) -> float:
    """Returns the share of the cores' time in which nothing ran since a `core_time`."""
    idle, whole = (now - then for then, now in zip(before, core_time(), strict=True))
    return idle / max(1.0, whole)


def prepare() -> None:
    """Lets this process remove its hosts when it is ended; exits where none can be emulated."""
    if reason := missing():
        sys.exit(f"emulated hosts: {reason}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def serve(
    connection: Connection, host: str, rank: int, size: int, kind: Callable[..., object], job: object
) -> None:
    """The life of a forked rank: the parent calls the methods of ``kind(rank, size, job)``."""
    die_with_parent()
    move_to_host(host)
    prefer()
    torch.set_num_threads(1)
    obey(connection, rank, kind(rank, size, job))


@contextlib.contextmanager
def emulated_world(
    title: str,
    hosts: int,
    rate: str | None,
    limit: float,
    kind: Callable[..., object],
    job: object,
    ranks_per_host: int = 1,
    **network: Any,
) -> Iterator[tuple[ForkedWorld, list[str]]]:
    """Makes hosts and starts ranks on them; returns both. They are gone afterwards.

    Args:
        title: Of the world, in errors.
        hosts: How many.
        rate: Of each host's link.
        limit: Seconds that a phase may take.
        kind: As of `serve`; ranks have the methods `start` and `leave`.
        job: As of `serve`.
        ranks_per_host: Consecutive ranks that share a host.
        network: More of `emulated_hosts`.

    Raises:
        Unavailable: Hosts cannot be emulated here.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    size = hosts * ranks_per_host
    with emulated_hosts(hosts, rate, **network) as names, ForkedWorld(title, size, limit) as ranks:
        ranks.fork(keep_store, address(0), PORT, names[0])
        ranks.port()
        for rank in range(size):
            ranks.fork(serve, names[rank // ranks_per_host], rank, size, kind, job)
        ranks.ask("start")
        yield ranks, names
        ranks.ask("leave")
        ranks.end()

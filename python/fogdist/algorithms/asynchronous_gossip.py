"""Asynchronous gossip in the manner of AD-PSGD: each rank averages with one neighbor at its own pace."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fogdist.collectives import barrier
from fogdist.context import Context, current
from fogdist.lazy import nx
from fogdist.memory import empty_flat
from fogdist.packing import BUCKET_CAP_MB
from fogdist.streams import Mark
from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.pace import MAX_STALENESS, Pace
from fogdist.training.view import Models, setting
from fogdist.windows import Window


class AsynchronousGossip(Algorithm):
    """AD-PSGD style gossip over windows: no rank waits for another. Collective to make and to `finish`.

    In a step, a rank i makes the optimizer's step, adds what neighbors have left for it, looks at one random
    neighbor j, and moves with it towards their mean, its own part now and j's part when j makes its next
    step::

        x_i = x_i + d(x_i) + inbox_i,      inbox_i = 0
        m   = w_ij (x_j - x_i)             with x_j as it is after j's last step
        x_i = x_i + m,                     inbox_j = inbox_j - m

    (Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
    arXiv 1710.06952.) There both move half the way in one atomic step, which takes the neighbor's attention;
    here the neighbor's part waits in a window. What one gains the other loses, so the sum of all x and
    inboxes is changed by the optimizers' steps only, at whatever speeds. A rank passes over neighbors that
    have not yet taken its last move, and makes a local step if that are all of them: so nobody is swamped by
    ranks that are faster. w is smaller than a half for the same reason, as several neighbors may move a rank
    at a time: with a_i the number of neighbors that choose i in a step on average,
    ``w_ij = 1 / (2 + max(a_i, a_j))``, which is 1/3 on regular graphs. A slow rank weighs in the result by
    the steps it makes. Gradients are of the parameters as they are in the model, which only the rank's own
    `step` changes.

    Neighbors are those of the group's topology, which must not change until `finish`; that puts the last
    moves into the parameters. To end with one model, average them then (`fogdist.allreduce_parameters`). A
    neighbor that was lost is passed over.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`; the trained parameters must stay the same ones.
        seed: Of the choice of neighbors; ranks may choose by different ones.
        local_steps: As in `Algorithm`: steps without gossip, in which the inbox is taken all the same.
        max_staleness: As in `fogdist.training.WindowAlgorithm`, of the neighbors' steps.
        group: As in `Algorithm`.
        bucket_cap_mb: As in `Algorithm`.

    Attributes:
        max_staleness: As above; can be changed at any time.

    Raises:
        ValueError: The edges of the topology that go both ways do not connect all ranks (the default
            topology's do not: set a ring, or `fogdist.SymmetricExponentialGraph`); and as `Algorithm`.
    """

    _seed: int
    _rank: int
    _shares: dict[int, float]
    max_staleness: int | None = setting(MAX_STALENESS)
    _windows: _Windows | None
    _pace: Pace | None

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        seed: int = 0,
        local_steps: int = 1,
        max_staleness: int | None = MAX_STALENESS,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
    ) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"seed must be an int, got {type(seed).__name__}")
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self.max_staleness = max_staleness
        context = current(group)
        mutual = context.topology.graph.to_undirected(reciprocal=True)
        mutual.remove_edges_from(list(nx.selfloop_edges(mutual)))
        if context.size > 1 and not nx.is_connected(mutual):
            raise ValueError(
                "the topology must connect all ranks by edges that go both ways, as RingGraph and "
                "SymmetricExponentialGraph do; got one whose such edges do not"
            )
        self._seed = seed
        self._rank = context.rank
        arrivals = {i: sum(1 / mutual.degree(j) for j in mutual[i]) for i in mutual}
        self._shares = {
            peer: 1 / (2 + max(arrivals[context.rank], arrivals[peer]))
            for peer in sorted(mutual[context.rank])
        }
        self._windows, self._pace = None, None
        super().__init__(optimizer, model, local_steps=local_steps, group=group, bucket_cap_mb=bucket_cap_mb)
        with torch.no_grad():
            self.refresh()
            if not self.is_alone:
                peers = list(self._shares)
                self._windows = _Windows(context, self.name, peers, self.values)
                self._pace = Pace(context, self.name, peers, peers)

    def finish(self) -> None:
        """Takes the last moves of all neighbors into the parameters and frees the windows. Collective.

        Steps are local ones from then on.

        Raises:
            torch.distributed.DistBackendError: A rank does not come.
        """
        if self._windows is None:
            return
        if self._pace is not None:
            self._pace.free()
        self._windows.tell()
        barrier(group=self._group)
        with torch.no_grad():
            self.buckets.reattach()
            self._windows.collect(self.values)
            self.buckets.write_back()
        windows, self._windows = self._windows, None
        windows.free()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. What is in inboxes is no part of a state dict: `finish` before.

        Raises:
            RuntimeError: The algorithm has not been finished since it was made, and there are other ranks:
                load the state into the plain optimizer, and the model's, before you make the algorithm.
        """
        if self._windows is not None:
            raise RuntimeError(
                "a state dict must be loaded before the algorithm is made, into its optimizer and model, or "
                "after finish()"
            )
        super().load_state_dict(state_dict)

    def advance(self) -> Any:
        """See the class."""
        result = self.adapt()
        is_due = self.count_step()
        windows = self._windows
        if windows is None:
            return result
        values = self.values
        windows.tell()
        if self._pace is not None:
            self._pace.wait(self.max_staleness)
        windows.collect(values)
        # By the number of steps, and not by how many draws there were: those depend on the others' speed.
        ready = windows.ready() if is_due else []
        if ready:
            peer = random.Random(f"{self._seed} {self._rank} {self.steps}").choice(ready)
            windows.move(values, peer, self._shares[peer])
            self.rounds += 1
        windows.publish(values)
        if self._pace is not None:
            self._pace.advance()
        return result

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        if self._windows is not None and not self._holds(*self._trained()):
            raise RuntimeError("parameters must not be added, frozen or unfrozen before finish()")
        super().refresh()


class _Windows:
    """What neighbors see of a rank, and where they leave what is for it.

    Args:
        context: The group.
        name: What all ranks call it.
        peers: Ranks to gossip with.
        values: The first values, one tensor for each flat vector.
    """

    def __init__(self, context: Context, name: str, peers: list[int], values: list[Tensor]) -> None:
        self._rank = context.rank
        # Moves that were sent to each peer, and moves that were taken of each rank.
        self._sent = dict.fromkeys(peers, 0)
        self._taken = torch.zeros(context.size, dtype=torch.float64, device="cpu")
        self._one = torch.zeros(context.size, dtype=torch.float64, device="cpu")
        self._one[context.rank] = 1.0
        self._values: list[Window] = []
        self._inboxes: list[Window] = []
        for place, x in enumerate(values):
            shown = empty_flat(x.numel(), x.dtype, x.device).copy_(x)
            self._values.append(Window(shown, context.group, name=f"{name}.values.{place}"))
            inbox = empty_flat(x.numel(), x.dtype, x.device).zero_()
            self._inboxes.append(Window(inbox, context.group, name=f"{name}.inbox.{place}", zero_init=True))
        # Which moves are in the inboxes, and, told to the others, which of theirs have been taken and shown.
        self._arrivals = Window(
            torch.zeros_like(self._one), context.group, name=f"{name}.arrivals", zero_init=True
        )
        self._receipts = Window(
            torch.zeros_like(self._one), context.group, name=f"{name}.receipts", zero_init=True
        )
        # What peers have not been told yet: to whom this rank has moved, and whose moves it shows by now. These are
        # numbers on the CPU, which must not overtake what a device has yet to do.
        self._devices = {x.device for x in values if x.device.type != "cpu"}
        self._marks: list[Mark] = []
        self._moved_to: list[int] = []
        self._shown: Tensor | None = None

    def collect(self, values: list[Tensor]) -> None:
        """Adds to `values` what neighbors have left."""
        # Before the moves: each that is counted is in the inboxes then.
        self._taken += self._arrivals.collect()
        self._arrivals.tensor.zero_()
        for inbox, x in zip(self._inboxes, values, strict=True):
            x.add_(inbox.collect())
            inbox.tensor.zero_()

    def ready(self) -> list[int]:
        """Returns the peers that have taken all moves of this rank, and show what they became by them."""
        return [
            peer
            for peer, sent in self._sent.items()
            if self._receipts.update(self_weight=0.0, neighbor_weights={peer: 1.0}, clone=True)[self._rank]
            == sent
        ]

    def move(self, values: list[Tensor], peer: int, share: float) -> None:
        """Moves `values` towards a peer's, and leaves it the opposite."""
        for shown, inbox, x in zip(self._values, self._inboxes, values, strict=True):
            shown.get(src_weights=[peer], skip_lost=True)
            move = shown.update(self_weight=0.0, neighbor_weights={peer: 1.0}, clone=True).sub_(x).mul_(share)
            x.add_(move)
            inbox.accumulate(move, dst_weights={peer: -1.0}, skip_lost=True)
        self._moved_to.append(peer)
        self._sent[peer] += 1

    def publish(self, values: list[Tensor]) -> None:
        """Shows the peers this rank's values, and then that their moves are in these.

        What a device does is told of with the next step, when it is mostly done, so that the host need not wait.
        """
        for shown, x in zip(self._values, values, strict=True):
            shown.tensor.copy_(x)
            if x.device.type != "cpu":
                shown.update(self_weight=1.0, neighbor_weights={})  # else it may not be what neighbors get
        self._shown = self._taken.clone()
        self._marks = [Mark(device) for device in self._devices]
        if not self._devices:
            self.tell()

    def tell(self) -> None:
        """Tells the peers of the last moves, and whose are shown, once the devices have come so far."""
        for mark in self._marks:
            mark.wait()
        for peer in self._moved_to:
            self._arrivals.accumulate(self._one, dst_weights=[peer], skip_lost=True)
        if self._shown is not None:
            self._receipts.put(self._shown, dst_weights=list(self._sent), skip_lost=True)
        self._marks, self._moved_to, self._shown = [], [], None

    def free(self) -> None:
        """Frees the windows; collective."""
        for window in (*self._values, *self._inboxes, self._arrivals, self._receipts):
            window.free()

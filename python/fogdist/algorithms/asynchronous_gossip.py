"""Asynchronous gossip in the manner of AD-PSGD: each rank averages with one neighbor at its own pace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from fogdist.context import Context, current
from fogdist.lazy import nx
from fogdist.streams import Mark, wait_until_complete
from fogdist.topology import Topology
from fogdist.topology.validation import check_int
from fogdist.training.algorithm import Algorithm, AlgorithmOptions, check_count
from fogdist.training.continuing import Watch
from fogdist.training.mixing import Plans, edges_of, rounds_of
from fogdist.training.pace import MAX_STALENESS, Notes, Pace
from fogdist.training.view import Models

if TYPE_CHECKING:
    from fog_pg._C import Window


class AsynchronousGossip(Algorithm):
    """AD-PSGD style gossip over windows: no rank waits for another. Collective to make and to `close`.

    After a forward pass, rank i begins to read the parameters of one random neighbor j. In `step` it makes the
    optimizer's step, adds the contents of its inbox, and moves with j towards their mean: it makes its own part now, and
    j makes its part in its next step::

        x_i = x_i + d(x_i) + inbox_i,      inbox_i = 0
        m   = w_ij (x_j - x_i)             with x_j as it was read
        x_i = x_i + m,                     inbox_j = inbox_j - m

    (Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
    arXiv 1710.06952.) In the paper both ranks move half the way in one atomic step, for which the neighbor must stop;
    here the neighbor's part waits in a window. One rank gains the amount that the other loses, so at any speeds only
    the optimizers' steps change the sum of all x and inboxes. A rank skips neighbors that have not yet applied its last
    move, and makes a local step if it has to skip all of them; so fast ranks do not overload a slow one. w is smaller
    than a half for the same reason, because several neighbors may move a rank at the same time: if a_i neighbors choose
    i in a step on average, ``w_ij = 1 / (2 + max(a_i, a_j))``, which is 1/3 on regular graphs. The weight of a slow rank
    in the result is proportional to its steps. Gradients are computed at the parameters in the model, which only the
    rank's own `step` changes.

    x_j is read in place and without a lock. On CPUs some of its elements may be from before a step that j is making, and
    others from after its optimizer's part, its inbox or its move: elements that would be equal may differ for a while.
    The sum is not affected, because each element of j loses what the same element of i gains, whatever was read. The
    reading runs beside the backward pass and the moves beside the next forward pass, so a rank that computes for longer
    waits for neither. A step reads by itself if no training pass of the model, called as a function, came before it.

    The neighbors of a rank are those of all rounds of `topology`, whose weights do not count; without one, those of the group's
    topology at the time of construction. Edges must go both ways: if those that do so do not connect all ranks, as in the
    default topology of four ranks and more, all edges count as both ways. `average` and `close` apply the last moves to the
    parameters. Lost neighbors are skipped.
    With ``on_loss="continue"`` the ranks that are left also agree once the graph would fall apart, in their next steps, and
    go on along what is left of the topology. No move between two of them gets lost; those with a lost rank stay as they
    are.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`; the trained parameters must stay the same ones.
        seed: The seed for the choice of neighbors; ranks may use different seeds.
        max_staleness: As in `fogdist.algorithms.WinPut`, counted in steps.
        **options: As in `Algorithm`, but `topology` is no mixing, and `compression` must have its default. Steps without
            gossip take from the inbox all the same.

    Attributes:
        max_staleness: As above; can be changed at any time.

    Raises:
        TypeError: As `Algorithm`.
        ValueError: The topology does not connect all ranks; and as `Algorithm`.
    """

    can_be_joined: ClassVar[bool] = True
    takes_compression: ClassVar[bool] = False

    _seed: int
    _topology: Topology | None  # of all ranks that there were; None for the group's
    _rank: int
    _shares: dict[int, float]
    max_staleness: int | None
    _windows: _Windows | None
    _watch: Watch | None
    _watches: list[Any]  # of PassWatch, whose module imports torch._dynamo
    _is_joining: bool

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        seed: int = 0,
        max_staleness: int | None = MAX_STALENESS,
        **options: Unpack[AlgorithmOptions],
    ) -> None:
        if max_staleness is not None:
            check_count(max_staleness, "max_staleness")
        self.max_staleness = max_staleness
        context = current(options.get("group"))
        given = options.get("topology")
        self._topology = None if given is None else rounds_of(given, context, f"for {self.algorithm_name}")
        graph = _gossip_graph(self._topology, context)
        if not nx.is_connected(graph):
            raise ValueError(
                "topology must connect all ranks for AsynchronousGossip, as 'ring' and 'symexp' do, got one of "
                f"{nx.number_connected_components(graph)} parts"
            )
        self._seed = check_int(seed, "seed")
        self._rank = context.rank
        self._shares = _shares_in(graph, context.viewpoint)
        self._windows = self._watch = None
        self._is_joining = context.is_joining  # it opens windows when it has joined the others
        self._watches = []
        options["topology"] = self._topology
        super().__init__(optimizer, model, **options)
        self.mixing.weights = ()
        with torch.no_grad():
            self.refresh()
            if not self.is_alone:
                if not self._is_joining:
                    self._windows = self._opened()
                if self._participant is not None:
                    self._watch = Watch(self._participant, self._edges)
                from fogdist.training.pass_watch import PassWatch

                self._watches = [PassWatch(each, "after", self._after_forward) for each in self._fog_models]

    def keeps_copies(self) -> bool:
        """See `Algorithm.keeps_copies`: what has arrived counts, which is another thing on each rank."""
        return False

    def settle(self) -> None:
        """Applies the last moves of all neighbors to the parameters; steps may follow. Collective."""
        if self._windows is not None:
            self._apply_all()
            with torch.no_grad():
                self._windows.publish()
            self.await_all()  # so that no rank reads or moves before all have published

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Algorithm.load_state_dict`. A state dict does not contain the inboxes: call `settle` before.

        Raises:
            RuntimeError: There are other ranks: load the state into the plain optimizer, and the model's, before you make
                the algorithm.
        """
        if self._windows is not None:
            raise RuntimeError(
                "a state dict must be loaded before the algorithm is made, into its optimizer and model, and then "
                "broadcast=False keeps it"
            )
        super().load_state_dict(state_dict)

    def _fog_finish(self) -> None:
        if self._windows is None:
            return
        self._remove_watches()
        self._windows.pace.pause()  # so that neighbors do not wait for this rank while it waits for them
        self._apply_all()
        windows, self._windows = self._windows, None
        windows.free()

    def _fog_give_up(self) -> None:
        """Also closes the windows without waiting; moves that have not been applied are lost."""
        super()._fog_give_up()
        self._remove_watches()
        self._windows = None

    def advance(self) -> Any:
        """See `Algorithm.advance`."""
        result = self.adapt()
        is_due = self.count_step()
        # One that has just joined may have no windows yet, because another rank was lost.
        has_joined = self._is_joining and not self.context.is_joining
        if self._watch is not None and (self._windows is not None or has_joined):
            self._watch.meet_if_needed()
        windows = self._windows
        if windows is None:
            return result
        windows.tell()
        windows.pace.wait(self.max_staleness)
        self.buckets.values()  # which the windows change
        windows.collect()
        if is_due and windows.being_read is None:
            self._begin_to_read(self.steps)
        if is_due and windows.being_read is not None:
            windows.move(self._shares)
            self.rounds += 1
        windows.publish()
        windows.pace.advance()
        return result

    def refresh(self) -> None:
        """See `Algorithm.refresh`."""
        if self._windows is not None and not self._holds(*self._trained()):
            raise RuntimeError(
                "parameters must not be added, frozen or unfrozen: close the algorithm, and make it anew"
            )
        super().refresh()

    def members_changed(self) -> None:
        """See `Algorithm.members_changed`: opens windows among the ranks of an epoch."""
        windows = self._windows
        if windows is None:
            if self._is_joining:
                self._shares = _shares_in(_gossip_graph(self._topology, self.context), self.context.rank)
                with contextlib.suppress(dist.DistBackendError):
                    self._windows = self._opened()
                    self._is_joining = False
            return
        windows.end_transfers()
        self._shares = _shares_in(_gossip_graph(self._topology, self.context), self.context.rank)
        # Once all ranks have opened the new windows, all moves have arrived in the old ones. If another rank is lost now,
        # the new group fails, and the ranks agree again before they use a window.
        opened = windows
        with contextlib.suppress(dist.DistBackendError):
            opened = self._opened()
        moves = windows.take_moves()
        windows.is_closed = True
        self._windows, opened.kept = opened, moves

    def _apply_all(self) -> None:
        """Waits until the moves of all ranks have arrived, and applies those for this rank."""
        assert self._windows is not None
        self._windows.end_transfers()
        self.await_all()
        with torch.no_grad():
            self.buckets.load()
            self._windows.collect()
            self.buckets.write_back()

    def _edges(self) -> NDArray[np.bool_]:
        graph = _gossip_graph(self._topology, self.context)
        return np.asarray(nx.to_numpy_array(graph, nodelist=range(self.context.size)) != 0)

    def _opened(self) -> _Windows:
        gives_way = self._participant is not None
        return _Windows(self.context, self.name, list(self._shares), self.values, gives_way)

    def _remove_watches(self) -> None:
        for watch in self._watches:
            watch.remove()

    def _after_forward(self) -> None:
        number = self.steps + 1
        windows = self._windows
        if windows is None or windows.is_closed:
            return
        if windows.being_read is None and number % self.local_steps == 0:
            with torch.no_grad():
                self._begin_to_read(number)

    def _begin_to_read(self, number: int) -> None:
        """Begins to read one of the neighbors that have applied all moves of this rank, for the step of this number."""
        assert self._windows is not None
        if ready := self._windows.ready():
            # The choice depends on the number of steps and not on the number of draws, which depends on the speed of
            # others.
            self._windows.read(random.Random(f"{self._seed} {self._rank} {number}").choice(ready))


def _gossip_graph(topology: Topology | None, context: Context) -> nx.Graph:
    """Returns who gossips with whom: along edges that go both ways, or along all edges if these do not connect all ranks.

    Args:
        topology: The topology of all ranks that there were; None for the group's.
        context: The group; what is left of a topology is that among its ranks.
    """
    rounds = Plans(topology, context).topology
    directed = context.topology.graph if rounds is None else nx.DiGraph(edges_of(rounds))
    mutual = directed.to_undirected(reciprocal=True)
    graph = mutual if nx.is_connected(mutual) else directed.to_undirected()
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return graph


def _shares_in(graph: nx.Graph, rank: int) -> dict[int, float]:
    """Returns the weights w of a rank with each of its peers."""
    arrivals = {i: sum(1 / graph.degree(j) for j in graph[i]) for i in graph}
    return {peer: 1 / (2 + max(arrivals[rank], arrivals[peer])) for peer in sorted(graph[rank])}


class _Windows:
    """The windows of a rank: for each vector of parameters one that neighbors read and an inbox, and a `Pace`.

    Args:
        context: The group.
        name: The name of the algorithm, the same on all ranks.
        peers: The ranks to gossip with.
        values: The flat vectors.
        gives_way: As of `Pace`.

    Attributes:
        kept: Moves that had arrived in windows of an earlier epoch, one sum for each vector; `collect` adds them.
        is_closed: Whether ranks have agreed on a loss since they were opened.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        peers: list[int],
        values: list[Tensor],
        gives_way: bool,
    ) -> None:
        def window(tensor: Tensor, what: str) -> Window:
            return context.backend.create_window(tensor, f"{name}.{what}", peers, peers, zero_init=True)

        self._values = values
        self._shown = [window(x, f"values.{place}") for place, x in enumerate(values)]
        self._inboxes = [window(x, f"inbox.{place}") for place, x in enumerate(values)]
        # Three counts for each peer: moves sent to it, those of them that it has applied, and moves received from it.
        self._sent = dict.fromkeys(peers, 0)
        self._told = dict.fromkeys(peers, 0)
        self._taken = {peer: [0] * len(values) for peer in peers}
        # A peer puts here how many moves of this rank are in the values that it shows.
        self._receipts = Notes(context, f"{name}.receipts", peers)
        self._acknowledged = dict.fromkeys(peers, 0)  # what this rank has put there
        self.pace = Pace(context, name, peers, peers, gives_way=gives_way)
        self.kept: list[Tensor] = []
        self.is_closed = False
        # These numbers are on the CPU and must not overtake pending work of a device.
        self._devices = {x.device for x in values if x.device.type != "cpu"}
        self._marks: list[Mark] = []
        self._sending: list[tuple[int, dist.Work]] = []
        # The peer whose values are on their way here, and their gets.
        self.being_read: tuple[int, list[dist.Work]] | None = None

    def collect(self) -> None:
        """Adds the contents of the inboxes to the values."""
        kept, self.kept = self.kept, []
        for x, moves in zip(self._values, kept, strict=False):
            x.add_(moves)
        for place, inbox in enumerate(self._inboxes):
            for peer, taken in self._taken.items():
                if inbox.slot_p(peer) != 0.0:  # the number of moves in the slot
                    inbox.p = 0.0
                    inbox.update(1.0, [(peer, 1.0)], reset=True, with_p=True)
                    taken[place] += int(inbox.p)
            inbox.p = 1.0

    def ready(self) -> list[int]:
        """Returns the peers that have applied all moves of this rank, and show the resulting values."""
        return [peer for peer, sent in self._sent.items() if self._has_taken(peer, sent)]

    def read(self, peer: int) -> None:
        """Begins to read a peer's values."""
        self.being_read = peer, [shown.get([(peer, 1.0)]) for shown in self._shown]

    def move(self, shares: Mapping[int, float]) -> None:
        """Moves the values towards those being read, and sends the opposite move. Does nothing if the peer is lost."""
        assert self.being_read is not None
        (peer, gets), self.being_read = self.being_read, None
        arrived = [self._arrives(get, peer) for get in gets]
        if not all(arrived):
            return
        share = shares[peer]
        for place, (x, inbox) in enumerate(zip(self._values, self._inboxes, strict=True)):
            inbox.p = -1.0  # so that 1 is sent
            move = self._shown[place].update(-share, [(peer, share)], clone=True)
            work = inbox.accumulate(move, [(peer, -1.0)], with_p=True)
            x.add_(move)
            self._sending.append((peer, work))
        self._sent[peer] += 1

    def publish(self) -> None:
        """Shows this rank's values to the peers, and then the numbers of their moves in the values.

        For values on a device, the numbers follow with the next step, when the device is usually done, so that the host
        does not wait.
        """
        for shown in self._shown:
            if shown.tensor.device.type != "cpu":
                shown.update(1.0, [])  # neighbors get only values that an update has written
        self._marks = [Mark(device) for device in self._devices]
        if not self._devices:
            self._show_receipts()

    def tell(self) -> None:
        """Waits for what the step before has sent, and shows the numbers of values that devices computed meanwhile."""
        for mark in self._marks:
            mark.wait()
        for peer, sending in self._sending:
            self._arrives(sending, peer)
        self._marks, self._sending = [], []
        self._show_receipts()

    def end_transfers(self) -> None:
        """Waits until the peers have what was sent to them, and forgets values that are being read."""
        _, gets = self.being_read or (None, [])
        self.being_read = None
        wait_until_complete([*gets, *(sending for _, sending in self._sending)])

    def take_moves(self) -> list[Tensor]:
        """Returns the sum of the moves that have arrived and are not in the values yet, one for each vector."""
        if self.is_closed:
            return self.kept
        sums = []
        for place, inbox in enumerate(self._inboxes):
            sums.append(inbox.update(0.0, [(peer, 1.0) for peer in self._taken], reset=True, clone=True))
            if self.kept:
                sums[place] += self.kept[place]
        self.kept = []
        return sums

    def free(self) -> None:
        """Frees all windows; collective."""
        self.pace.free()
        for window in (*self._shown, *self._inboxes):
            window.free()
        self._receipts.free()

    def _show_receipts(self) -> None:
        for peer, taken in self._taken.items():
            if min(taken) > self._acknowledged[peer]:
                self._acknowledged[peer] = min(taken)
                self._sending.append((peer, self._receipts.tell(peer, [self._acknowledged[peer]])))

    def _arrives(self, work: dist.Work, peer: int) -> bool:
        """Waits for an operation on a peer. Returns False if the peer is lost."""
        try:
            work.wait()
        except dist.DistBackendError:
            if not self._receipts.is_gone(peer):
                raise
            return False
        return True

    def _has_taken(self, peer: int, sent: int) -> bool:
        if self._receipts.is_gone(peer):
            return False
        if self._told[peer] != sent:
            self._told[peer] = int(self._receipts.heard(peer)[0])
        return self._told[peer] == sent

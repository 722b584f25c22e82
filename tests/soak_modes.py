"""What the ranks of `soak_faults` do: each mode is one way to train, which checks its own sums and averages."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hosts import address, move_to_host
from injected_faults import Fault, Kind
from torch import Tensor, nn

RANKS = 4
# Seconds of compute of a step. An exchange takes a small part of it.
COMPUTE_SECONDS = 0.005
# float32 of a model, or of a sum.
NUMEL = 1 << 14
# A rank whose step takes so long hangs. The timeout of groups is shorter, so an operation that waits raises before that.
PATIENCE_SECONDS, GROUP_TIMEOUT = 20.0, 10.0
# Steps that a rank records, which are more than it can make in a world.
MOST_STEPS = 1 << 16
# Frequencies of faults on one host.
KINDS: dict[Kind, float] = {"kill": 3.0, "segfault": 1.0, "stop": 3.0, "deadlock": 2.0}
# These happen in the rank's own process, at its next step.
OWN: tuple[Kind, ...] = ("deadlock", "lose_store")
STORE_PORT = 29517


class Board:
    """Memory that ranks and their parent share: a file in a folder of theirs.

    Attributes:
        ends: The end of each step, by rank, on the clock of the host.
        steps: How many each rank has made.
        lost: Whether the parent has let the rank end.
        order: What is to happen to the rank at its next step: 0, or 1 for the first of `OWN`, and so on.
        seconds: For how long.
        moment: The moment of its work at which the rank is to end its process, counted from 1; 0 for none.
        doing: The moment at which it is.
        died: When it has ended its process, or was about to.
        over: The step after which ranks end their training; 0 while it goes on.
        seed: Of the data that the ranks train on.
    """

    def __init__(self, path: Path) -> None:
        size = 8 * (RANKS * (MOST_STEPS + 7) + 2)
        if not path.exists():
            path.write_bytes(b"")
            os.truncate(path, size)
        numbers = np.memmap(path, np.float64, "r+")
        self.ends = numbers[: RANKS * MOST_STEPS].reshape(RANKS, MOST_STEPS)
        rest = numbers[RANKS * MOST_STEPS : -2].reshape(7, RANKS)
        self.steps, self.lost, self.order, self.seconds, self.moment, self.doing, self.died = rest
        self.over, self.seed = numbers[-2:-1], numbers[-1:]

    def count(self, rank: int) -> bool:
        """Records the end of a step; returns whether there is room for more."""
        made = int(self.steps[rank])
        self.ends[rank, made] = time.monotonic()
        self.steps[rank] = made + 1
        return made + 1 < MOST_STEPS


@dataclass
class Report:
    """What a rank that lives tells at its end.

    Attributes:
        wrong: What was not as it must be.
        raised: How many operations raised because a rank was lost.
        losses: Before the first step, and after each one, in modes that learn.
    """

    wrong: list[str] = field(default_factory=list)
    raised: int = 0
    losses: list[float] = field(default_factory=list)


class Mode:
    """One way to train; objects of it live on a rank.

    Args:
        rank: This rank.
        board: See there.

    Attributes:
        all_wait: Whether all ranks wait while one is stopped.
        initialize: Whether the ranks are in a group of fog.
        patience: A rank whose step takes so many seconds hangs.
        tail: Seconds from the last fault to the end of a world, in which survivors must make a step.
        kinds: Frequencies of the faults that the mode survives, on one host.
        moments: Names of what a rank does in turn, at each of which a rank can be killed; none if that is not known.
    """

    all_wait = False
    initialize = True
    patience = PATIENCE_SECONDS
    tail = 2.0
    kinds: Mapping[Kind, float] = KINDS
    moments: Sequence[str] = ()

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.board, self.report = rank, board, Report()

    @classmethod
    @contextlib.contextmanager
    def around(cls) -> Iterator[dict[str, str]]:
        """What the ranks of a world need beside them; gives their environment variables."""
        yield {"_FOG_CONFIRM": "0"}

    def step(self) -> bool:
        """Makes a step; returns whether all ranks have agreed to end, or this one may end by itself."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the training."""

    def living(self) -> list[int]:
        """The ranks that are not lost, as the parent knows."""
        return [rank for rank in range(RANKS) if not self.board.lost[rank]]

    def expect(self, name: str, is_right: bool) -> None:
        """Reports what is not as it must be."""
        if not is_right:
            self.report.wrong.append(f"step {int(self.board.steps[self.rank])}: {name}")


class Neighbors(Mode):
    """`DecentralizedDataParallel` in mode "sync", whose ranks go on with those that are left.

    Each rank pulls parameters, which are equal, to its own number, so averages lie between the first value and all ranks'
    numbers. A mix that were torn, or whose weights did not sum to 1, would show. Beside them, the ranks learn a linear model
    from samples with noise, so that the loss with and without faults can be compared.
    """

    START = 10.0
    # Of the linear model: its rate is such that the noise of the gradients, with two ranks, adds about 1% to the loss.
    INPUTS, SAMPLES, RATE = 64, 32, 0.02
    all_wait = True
    options: Mapping[str, Any] = {"mode": "sync", "on_loss": "continue"}

    def __init__(self, rank: int, board: Board) -> None:
        import fogdist

        super().__init__(rank, board)
        fogdist.init()
        torch.manual_seed(int(board.seed[0]))
        self.truth = torch.randn(self.INPUTS)
        self.samples = torch.Generator().manual_seed(RANKS * int(board.seed[0]) + rank)
        module = _PulledAndLearned(torch.full((NUMEL,), self.START), float(rank), torch.zeros(self.INPUTS))
        groups = [{"params": [module.values]}, {"params": [module.weight], "lr": self.RATE}]
        self.model = fogdist.DecentralizedDataParallel(
            module,
            torch.optim.SGD(groups, lr=0.05),
            fogdist.topology.fully_connected(RANKS),
            **self.options,
        )
        self.values, self.weight = module.values, module.weight
        self.report.losses.append(self._loss())

    def step(self) -> bool:
        inputs = torch.randn(self.SAMPLES, self.INPUTS, generator=self.samples)
        outputs = inputs @ self.truth + torch.randn(self.SAMPLES, generator=self.samples)
        self.model.optimizer.zero_grad()
        self.model(inputs, outputs).backward()
        self.model.optimizer.step()
        values = self.values.detach()
        first = values[0].item()
        self.expect(f"values from {values.min()} to {values.max()}", bool((values == first).all()))
        self.expect(f"{first} is no average", 0.0 <= first <= self.START)
        self.report.losses.append(self._loss())
        return 0.0 < self.board.over[0] <= self.board.steps[self.rank] + 1

    def close(self) -> None:
        if self.board.lost[self.rank]:  # its link was cut, so it has trained alone
            return
        middle = statistics.mean(self.living())
        value = self.values[0].item()
        # Each living rank pulls to its number, and the others pull it to theirs.
        self.expect(f"{value} is far from {middle}", abs(value - middle) < 1.0)

    def _loss(self) -> float:
        """Returns the loss that the linear model has on average over all possible samples."""
        return 0.5 * ((self.weight.detach() - self.truth).square().sum().item() + 1.0)


class Asynchronous(Neighbors):
    """The same in mode "async", where ranks go on without lost ones."""

    all_wait = False
    options: Mapping[str, Any] = {"mode": "async", "skip_lost": True}
    kinds = KINDS | {"lose_store": 0.5}

    def step(self) -> bool:
        super().step()
        return bool(self.board.over[0])

    def close(self) -> None:
        self.model.pause()  # the others may go on
        super().close()


class AsynchronousOnLoss(Asynchronous):
    """The same with the option that both modes have."""

    options: Mapping[str, Any] = {"mode": "async", "on_loss": "continue"}
    kinds = KINDS


class _PulledAndLearned(nn.Module):
    """Values whose loss is half their squared distance from a number, and a linear model with that of its errors."""

    def __init__(self, values: Tensor, target: float, weight: Tensor) -> None:
        super().__init__()
        self.values, self.weight = nn.Parameter(values), nn.Parameter(weight)
        self.target = target

    def forward(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        errors = inputs @ self.weight - outputs
        return 0.5 * ((self.values - self.target).square().sum() + errors.square().mean())


class Collectives(Mode):
    """Sums of all ranks, and of neighbors; after a loss all living ranks raise, and go on in a smaller group."""

    all_wait = True

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board)
        self.members = list(range(RANKS))
        self.group = dist.group.WORLD
        self.number = 0

    def step(self) -> bool:
        while True:
            try:
                return self._step()
            except dist.DistError as error:
                if self.board.lost[self.rank]:  # its link was cut
                    return True
                self._go_on_after(error)

    def _step(self) -> bool:
        # The first two values are whether this rank is to end, and its step, which all must have alike.
        tensor = torch.full((NUMEL,), float(2**self.rank))
        tensor[0], tensor[1] = float(self.board.over[0]), float(self.number)
        dist.all_reduce(tensor, group=self.group)
        size = len(self.members)
        total = float(sum(2**member for member in self.members))
        self.expect(
            f"the sum over {self.members} is {tensor[2:].unique()}", bool((tensor[2:] == total).all())
        )
        self.expect(f"steps {tensor[1] / size} and {self.number}", tensor[1].item() == size * self.number)
        self.number += 1
        return tensor[0].item() > 0.0

    def _go_on_after(self, error: dist.DistError) -> None:
        """Makes a group of those that live, after an operation has raised."""
        self.report.raised += 1
        before = self.members
        # Another rank may be lost, or be known as lost to some ranks only, while the group is made.
        for _ in range(RANKS):
            try:
                self.members = self._make_group(error, before)
                number = torch.tensor([self.number])
                dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
                self.begin_again()
            except dist.DistError as again:
                error = again
                continue
            self.number = int(number)
            return
        raise error

    def _make_group(self, error: dist.DistError, before: Sequence[int]) -> list[int]:
        """Makes a group of those that live; returns them."""
        members = self.living()
        self.expect(f"raised without a lost rank: {error}", len(members) < len(before))
        self.group = dist.new_group(
            members, timeout=timedelta(seconds=GROUP_TIMEOUT), use_local_synchronization=True
        )
        return members

    def begin_again(self) -> None:
        """Makes what the operations of a new group need; every member calls it."""


class Reconfigured(Collectives):
    """The same with `fogdist.reconfigure`, which finds out who is left."""

    def __init__(self, rank: int, board: Board) -> None:
        import fogdist

        super().__init__(rank, board)
        fogdist.init()

    def _make_group(self, error: dist.DistError, before: Sequence[int]) -> list[int]:
        import fogdist

        self.group = fogdist.reconfigure()
        members = list(fogdist.membership.current().living)
        self.expect(f"{members} are left of {before}", set(members) < set(before))
        return members


# Trainings that are over: as in a script, their windows stay until the process ends, and others may still put to them.
_ended: list[Mode] = []


def train(mode: type[Mode], path: str, host: str | None) -> Report:
    """Trains on a rank until the parent says that it is over; on a host of its own, if one is named."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if host is not None:
        import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

        move_to_host(host)
        store = dist.TCPStore(address(RANKS), STORE_PORT, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "fog",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=RANKS,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )
    board, rank = Board(Path(path)), int(os.environ["RANK"])
    training = mode(rank, board)
    while True:
        if board.order[rank]:
            kind, board.order[rank] = OWN[int(board.order[rank]) - 1], 0.0
            Fault(0, rank, kind, float(board.seconds[rank])).inject()
        time.sleep(COMPUTE_SECONDS)
        is_over = training.step()
        if not board.count(rank) or is_over:
            break
    training.close()
    _ended.append(training)
    return training.report


def keep_store(host: str) -> None:
    """Serves the Store of ranks on several hosts, in a process that is none of them."""
    move_to_host(host)
    store = dist.TCPStore(address(RANKS), STORE_PORT, is_master=True, wait_for_workers=False)
    threading.Event().wait()
    del store

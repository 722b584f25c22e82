"""What a rank of `soak_joins` does: it trains, writes down each step, and stands still at the moment that it is told.

It is the script of `fog run --keep-going`, with the path of the board and the kind of training, as of
`test_membership.make`. Each rank pulls the parameters, which are equal, to a number of its own, so averages lie between
these numbers, and what the ranks have in common moves by the mean of their pulls, whoever averages with whom.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import numpy as np
import torch
import torch.distributed as dist
from fogdist.elastic.admission import Admission
from fogdist.elastic.joiner import Joiner
from fogdist.elastic.membership import Members
from soak_modes import COMPUTE_SECONDS, MOST_STEPS, RANKS, Board
from test_membership import make
from test_on_loss import end, is_whole
from test_tuning import move_each_time
from torch import nn

from fog_pg import _joining

# Rank r pulls to this number and r.
FIRST_TARGET = 10.0
RATE, RATE_OF_ADAM = 0.05, 0.01
# The last steps of a training only mix.
COOL_STEPS = 80
# In these kinds ranks may be many steps apart: none learns any more as soon as the end is known, because the last one has
# nobody to mix with.
AT_OWN_PACE = {"AsynchronousGossip", "WinPut", "wrapper/async"}
# After so many steps, all ranks take the mean of all, in the kind that does so.
AVERAGE_STEPS = 25
TIMEOUT = 40.0

# What a rank does when it is killed: while it trains; while it handles the loss of another one; while it lets a process
# join; and while it joins.
TRAINS = ("computes", "before an exchange", "in an exchange", "after an exchange")
LOSES = ("a round begins", "a loss is decided", "the group after a loss is made", "a new Store is told")
ADMITS = (
    "before it gives its state",
    "after it gave its state",
    "a join is decided",
    "the group after a join is made",
)
JOINS = ("starts", "has the state", "is ready", "is admitted", "is connected", "is in")
MOMENTS = (*TRAINS, *LOSES, *ADMITS, *JOINS)

_STEP = np.dtype(
    [
        ("end", "f8"),
        ("step", "f8"),
        ("epochs", "f8", 2),
        ("before", "f8", 2),
        ("after", "f8", 2),
        ("living", "f8"),
    ]
)


class JoinBoard(Board):
    """What processes that come and go share with their parent.

    Attributes:
        records: Each step of each rank: its number, the epochs before and after it, the values of both buckets when the
            gradient was computed and at the end, and the ranks that take part, as bits.
        process: The process of each rank; 0 from its loss until the next one has made a step.
        store: The place of the Store in use, as each rank knows it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        more = path.with_suffix(".records")
        size = RANKS * MOST_STEPS * _STEP.itemsize + 2 * 8 * RANKS
        if not more.exists():
            more.write_bytes(b"")
            os.truncate(more, size)
        rest = np.memmap(more, np.float64, "r+")
        self.records = rest[: -2 * RANKS].view(_STEP).reshape(RANKS, MOST_STEPS)
        self.process, self.store = rest[-2 * RANKS :].reshape(2, RANKS)


class Rank:
    """A process with a rank.

    Args:
        board: See there.
        kind: Of training.
    """

    def __init__(self, board: JoinBoard, kind: str) -> None:
        self._board, self._kind, self._rank = board, kind, int(os.environ["RANK"])
        self.is_member = False

    def come_to(self, moment: str) -> None:
        """Stands still if the rank is to be killed at this moment."""
        place, board, rank = 1 + MOMENTS.index(moment), self._board, self._rank
        if board.moment[rank] == place:
            board.doing[rank] = place
            while board.moment[rank] == place:  # the parent kills it, and may do so too late
                time.sleep(0.001)

    def train(self) -> dict[str, Any]:
        """Trains until the parent says that it is over; returns what the rank has at its end."""
        board, rank = self._board, self._rank
        dist.init_process_group("fog", timeout=timedelta(seconds=TIMEOUT))
        fogdist.init()
        kind, _, option = self._kind.partition("+")
        model = Pulled(FIRST_TARGET + (RANKS - 1) / 2)
        rate = RATE_OF_ADAM if kind == "DecentralizedAdamW" else RATE
        if option == "tune":
            move_each_time()
            sgd = torch.optim.SGD(model.parameters(), lr=rate)
            tune = fogdist.Tune(max_local_steps=2)
            called: Any = model
            optimizer: Any = fogdist.DecentralizedOptimizer(
                sgd, model, tune=tune, on_loss="continue", broadcast=False
            )
        else:
            # With the momentum of its default, the ranks of random pairs swing far apart, also without faults.
            given = {"outer_momentum": 0.3} if kind == "GASLoC" else {}
            called, optimizer = make(kind, model, rate, **given)
        is_wrapper = kind.startswith("wrapper")
        whole = is_whole(kind)
        while True:
            self.come_to("computes")
            time.sleep(COMPUTE_SECONDS)
            epoch, before = fogdist.membership.current().epoch, model.both(whole)
            optimizer.zero_grad()
            called(FIRST_TARGET + rank).backward()
            self.come_to("before an exchange")
            if board.moment[rank] == 1 + MOMENTS.index("in an exchange"):
                board.doing[rank] = board.moment[rank]  # the parent kills it in a moment
            optimizer.step()
            self.come_to("after an exchange")
            step = called.round if is_wrapper else optimizer.steps
            now, after = fogdist.membership.current(), model.both(whole)
            if os.environ.get("FOG_JOIN") == "1" and now.epoch == 0:
                continue  # a local step before the first exchange, in which the process joins
            living = sum(2**each for each in now.living)
            made = int(board.steps[rank])
            standby = _joining._standby
            board.store[rank] = 0 if standby is None else standby._addresses.index(standby._address)
            board.records[rank, made] = (time.monotonic(), step, (epoch, now.epoch), before, after, living)
            board.process[rank] = os.getpid()
            self.is_member = True
            if option == "average" and step % AVERAGE_STEPS == 0:
                optimizer.average()
                board.records["after"][rank, made] = model.both(whole)
            is_last = not board.count(rank)
            over = board.over[0]
            if over and (step >= over - COOL_STEPS or self._kind in AT_OWN_PACE):
                for group in optimizer.param_groups:  # a process that joins has others then
                    group["lr"] = 0.0
            if is_last or (over and step >= over):
                break
        if kind.endswith("patience"):  # ranks may be some steps apart
            called.average() if is_wrapper else optimizer.average()
        end(called, optimizer)
        return {"rank": rank, "values": model.both(whole), "step": step}


class Pulled(nn.Module):
    """Two layers with parameters that are all alike, and are pulled to a number."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(size, start) for size in (40, 300))

    def forward(self, target: float) -> torch.Tensor:
        return torch.stack([((layer() - target) ** 2).sum() / 2 for layer in self.layers]).sum()

    def both(self, is_whole: bool) -> list[float]:
        """Returns the values of the two layers, whose elements are the same if they are mixed at once."""
        values = [each.detach() for each in self.parameters()]
        assert not is_whole or all(float(each.max() - each.min()) < 1e-9 for each in values), values
        return [float(each.mean()) for each in values]


class _Layer(nn.Module):
    def __init__(self, size: int, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start, dtype=torch.float64))

    def forward(self) -> nn.Parameter:
        return self.weight


def watch(rank: Rank) -> None:
    """Lets this process come to the moments of membership."""

    def around(owner: Any, name: str, before: Callable[..., str], after: Callable[..., str]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            if moment := before(*arguments):
                rank.come_to(moment)
            found = original(*arguments, **options)
            if moment := after(*arguments):
                rank.come_to(moment)
            return found

        setattr(owner, name, wrapped)

    def of_form(loss: str, join: str) -> Callable[..., str]:
        def moment(_: Members, form: Any) -> str:
            return (join if form.decision.joins else loss) if rank.is_member else ""

        return moment

    def at(moment: str) -> Callable[..., str]:
        return lambda *_: moment

    never = at("")
    around(Members, "_agreed", at("a round begins"), never)
    around(
        Members,
        "_adopt",
        of_form("a loss is decided", "a join is decided"),
        of_form("the group after a loss is made", "the group after a join is made"),
    )
    around(Members, "_enter_store", lambda members: "a new Store is told" if rank.is_member else "", never)
    around(Admission, "_give", at("before it gives its state"), at("after it gave its state"))
    around(Joiner, "pull", at("starts"), at("has the state"))
    around(Joiner, "_await", lambda _, what: "is ready" if what == "admitted" else "", never)
    around(Joiner, "enter", never, at("is admitted"))
    around(Members, "_await_all", at("is connected"), at("is in"))


def main() -> None:
    """Trains as a rank; what it raises is a line of a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, kind = Path(sys.argv[1]), sys.argv[2]
    log = os.open(path.with_name(f"rank-{os.environ['RANK']}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    rank = Rank(JoinBoard(path), kind)
    watch(rank)
    name = "ended"
    try:
        told = rank.train()
    except BaseException as error:
        name = "failed"
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        told = {"rank": rank._rank, "member": rank.is_member, "error": text, "at": time.monotonic()}
        traceback.print_exc()
        raise
    finally:
        with path.with_name(name).open("a") as file:
            file.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()

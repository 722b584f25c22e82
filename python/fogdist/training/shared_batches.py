"""Batches of a data set that all ranks share, in parts as large as each rank is fast."""

from __future__ import annotations

import functools
import heapq
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils.data import Sampler

from fog_pg import _joining
from fogdist.agreement import check_same_everywhere
from fogdist.context import current
from fogdist.elastic.membership import members_of
from fogdist.topology.validation import check_int
from fogdist.training.algorithm import Algorithm
from fogdist.training.mixing import GlobalAverage, Round

# The sum of all ranks' shares.
_WHOLE = 1_000_000


class SharedBatches(Sampler[list[int]]):
    """Gives each rank its part of the batches of a data set, by its measured speed. Collective to make.

    It is the `batch_sampler` of a loader of torch::

        batches = fogdist.SharedBatches(optimizer, len(data), 256)
        loader = torch.utils.data.DataLoader(data, batch_sampler=batches)
        while optimizer.steps < 10_000:
            for x, y in loader:  # to the end of an epoch
                ...
                optimizer.step()

    Each step uses one batch of all ranks. Batch number k is that of the step k of the optimizer, so the position in the data
    goes with the optimizer: into a checkpoint, and to a process that joins. In an epoch without losses and joins each
    sample is used once, by one rank. If `batch` does not divide `length`, all batches of an epoch are a little smaller.

    All ranks begin with equal parts. Every `every` rounds they tell each other, in one exchange of a few numbers, how many
    samples a second they have computed: between two steps, without waits for other ranks. From then on, after the batches
    that loaders have drawn already, parts are in proportion to that. They depend on these numbers alone.

    The part of a lost rank is left out, and a process that joins uses samples that others use too, until ranks measure again.

    Args:
        optimizer: An algorithm, or what `DecentralizedOptimizer` returns. With ``by_samples=True`` ranks weigh by their parts,
            without which the mean follows a small part as far as a large one.
        length: The number of samples of the data set.
        batch: The number of samples in a step of all ranks together.
        seed: Of the order of samples, another one in each epoch. None for the order of the data set.
        every: The number of rounds between two measurements.
        smallest: The least that a rank gets.
        largest: The most that a rank gets, as its memory allows; None for any number. Where the ranks left cannot take all of
            a batch, the rest of it is left out.

    Raises:
        TypeError: `optimizer` is no algorithm; a number is no integer.
        ValueError: The bounds exclude each other or do not fit `batch` and `length`; a number is out of its range; the
            optimizer has such batches already; ranks disagree (on all ranks alike).
    """

    def __init__(
        self,
        optimizer: Algorithm,
        length: int,
        batch: int,
        *,
        seed: int | None = 0,
        every: int = 20,
        smallest: int = 1,
        largest: int | None = None,
    ) -> None:
        if not isinstance(optimizer, Algorithm):
            raise TypeError(
                f"optimizer must be of DecentralizedOptimizer or fogdist.algorithms, got {type(optimizer).__name__}"
            )
        whole = current(optimizer._group)
        self._length = check_int(length, "length", minimum=whole.size)
        batch = check_int(batch, "batch", minimum=whole.size)
        self._smallest = check_int(smallest, "smallest", minimum=1)
        self._largest = self._length if largest is None else check_int(largest, "largest", minimum=1)
        self._every = check_int(every, "every", minimum=1)
        self._seed = None if seed is None else check_int(seed, "seed", minimum=0)
        self._count = -(-self._length // batch)
        least = self._length // self._count
        if not self._smallest * whole.size <= least:
            raise ValueError(
                f"smallest must be at most {least // whole.size}, as {whole.size} ranks share batches of {least}, got "
                f"{smallest}"
            )
        if self._largest * whole.size < batch:
            raise ValueError(
                f"largest must be at least {-(-batch // whole.size)}, as {whole.size} ranks share batches of {batch}, got "
                f"{largest}"
            )
        if optimizer.batches is not None:
            raise ValueError(
                "optimizer must have no SharedBatches yet, got one that has; make a new optimizer too"
            )
        self._optimizer: Algorithm = weakref.proxy(optimizer)
        self._rank = whole.rank
        self._equal = [1] * whole.size
        self._epoch_and_order: tuple[int, torch.Tensor] | None = None
        self._drawn = self._ahead = self._restarts = 0
        self._rounds = optimizer.rounds
        self._used, self._seconds = 0, 0.0  # since the last measurement
        self._since: float | None = None  # when the clock was started
        described = [f"{length=}", f"{batch=}", f"{seed=}", f"{every=}", f"{smallest=}", f"{largest=}"]
        if optimizer.on_loss == "continue":
            self._ranks = _joining.max_ranks(whole.size)
            members_of(optimizer._group).check_same(f"{optimizer.name} batches", "SharedBatches", described)
        else:
            self._ranks = whole.size
            check_same_everywhere(whole.backend, "SharedBatches", described)
        optimizer.batches = self

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the places of this rank's samples in each batch, from that of the next step to the end of its epoch."""
        place, restarts = self._optimizer.steps, self._restarts
        while True:
            self._ahead, self._drawn = place - self._optimizer.steps, place + 1
            yield self._part(place)
            place += 1
            if restarts != self._restarts:  # a loader may have drawn batches before, which come first
                place, restarts = self._optimizer.steps + self._ahead, self._restarts
            if place % self._count == 0:
                return

    def size_of(self, place: int) -> int:
        """Returns the size of this rank's part of the batch with this number."""
        begin, end = self._bounds(place)
        return end - begin

    # --- for the algorithm ---

    def restart(self) -> None:
        """Called when the optimizer's steps and rounds are other ones than before."""
        self._restarts += 1
        self._rounds = self._optimizer.rounds

    def stop(self) -> None:
        """Stops the clock at the beginning of a step, whose batch this rank has computed."""
        flats = self._optimizer.buckets.flats if self._optimizer.is_running else []
        for device in {flat.device for flat in flats if not flat.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._used += self.size_of(self._optimizer.steps)
            self._since = None

    def end_step(self) -> None:
        """Measures, if it is time to, and starts the clock."""
        rounds, self._rounds = self._rounds, self._optimizer.rounds
        if rounds // self._every != self._rounds // self._every and not self._optimizer.is_alone:
            self._measure()
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which this rank may wait for others, between two steps or within one."""
        begin = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - begin

    # --- inside ---

    @torch.no_grad()
    def _measure(self) -> None:
        """Tells the speed of this rank and hears those of all others, which decide about the batches that follow."""
        optimizer = self._optimizer
        told = torch.zeros(2, self._ranks, dtype=torch.float64, device="cpu")
        told[0, self._rank] = max(self._used, 1) / max(self._seconds, 1e-9)
        told[1, self._rank] = self._drawn
        name = f"{optimizer.name} batches"
        exchange = Round.of(optimizer.context, optimizer.rounds, name)
        optimizer._fog_begin([told], GlobalAverage(), exchange, True)()
        self._used, self._seconds = 0, 0.0
        ranks = optimizer.context.size
        if int(torch.count_nonzero(told[0])) != ranks:
            return  # the others have told each other before a loss
        speeds = (told[0] / told[0].sum() * _WHOLE).tolist()
        begin = round(float(told[1].max()) * ranks)
        shares = [begin, *(max(1, int(speed)) if speed else 0 for speed in speeds)]
        # Those of batches that were used are forgotten.
        known = optimizer.shares
        first = max((k for k, (at, *_) in enumerate(known) if at <= optimizer.steps), default=0)
        optimizer.shares = [*known[first:], shares]

    def _shares(self, place: int) -> Sequence[int]:
        """Returns the share of each rank in the batch with this number."""
        for begin, *shares in reversed(self._optimizer.shares):
            if begin <= place:
                return shares
        return self._equal

    def _bounds(self, place: int) -> tuple[int, int]:
        """Returns where this rank's part of a batch begins and ends in the order of its epoch."""
        number = place % self._count
        first = number * self._length // self._count
        total = (number + 1) * self._length // self._count - first
        shares = self._shares(place)
        if self._rank >= len(shares) or not shares[self._rank]:
            # It has joined, and the ranks have not measured since.
            return first, first + min(total // max(1, sum(map(bool, shares))), self._largest)
        sizes = parts(total, tuple(shares), self._smallest, self._largest)
        begin = first + sum(sizes[: self._rank])
        return begin, begin + sizes[self._rank]

    def _part(self, place: int) -> list[int]:
        begin, end = self._bounds(place)
        if self._seed is None:
            return list(range(begin, end))
        epoch = place // self._count
        if self._epoch_and_order is None or self._epoch_and_order[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch_and_order = epoch, torch.randperm(self._length, generator=generator)
        return self._epoch_and_order[1][begin:end].tolist()


@functools.lru_cache(maxsize=64)
def parts(total: int, shares: tuple[int, ...], smallest: int, largest: int) -> list[int]:
    """Returns how many of `total` each rank gets: in proportion to its share, as near as whole numbers and bounds allow.

    They are Webster's apportionment with bounds: each sample goes to the rank that is furthest below its proportion.

    Args:
        total: A number of samples.
        shares: One for each rank; one with a share of 0 gets nothing.
        smallest: The least that any other gets, if there is enough for all.
        largest: The most; if all have that, the rest is left.
    """
    sharing = [rank for rank, share in enumerate(shares) if share]
    least = min(smallest, largest, total // len(sharing))
    sizes = [least if share else 0 for share in shares]
    queue = [((2 * least + 1) / shares[rank], rank) for rank in sharing if least < largest]
    heapq.heapify(queue)
    for _ in range(total - least * len(sharing)):
        if not queue:
            break
        _, rank = queue[0]
        sizes[rank] += 1
        if sizes[rank] < largest:
            heapq.heapreplace(queue, ((2 * sizes[rank] + 1) / shares[rank], rank))
        else:
            heapq.heappop(queue)
    return sizes

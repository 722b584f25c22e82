"""Asynchronous diffusion: averages with values that neighbors put, or that a rank gets from them, at each rank's pace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import torch.distributed as dist

from fogdist.training.view import setting
from fogdist.training.window_algorithm import WindowAlgorithm
from fogdist.windows import Window


class AsynchronousDiffusion(WindowAlgorithm):
    """Base of both: ``x+ = w_ii x + sum_j w_ji slot_j + d(x)``, with the current values of the slots.

    An empty slot stands for this rank's own x. (Zhao and Sayed, "Asynchronous adaptation and learning over networks",
    IEEE Transactions on Signal Processing 63, 2015.)

    Attributes:
        skip_lost: True to skip neighbors that are known to be lost; their last parameters still count unless
            the weights of the average exclude them. By default `step` raises.
    """

    skip_lost: bool = setting(False)
    _mean: tuple[float, dict[int, float]]
    _heard: dict[Window, set[int]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._heard = {}
        super().__init__(*arguments, **options)
        self._mean = self.context.topology.mean_weights  # the topology cannot change while there are windows

    def take(self, window: Window) -> None:
        """See `WindowAlgorithm`."""
        own, others = self._shift(window, *(self._given_weights() or self._mean))
        window.update(self_weight=own, neighbor_weights=others)

    def check_weights(self) -> None:
        """See `WindowAlgorithm.check_weights`."""
        self._given_weights()

    def _given_weights(self) -> tuple[float, dict[int, float]] | None:
        """Returns the weights that the user has set for the average, if any.

        Raises:
            TypeError: `src_weights` is not a dict.
        """
        if self.self_weight is None:
            return None
        if not isinstance(self.src_weights, Mapping):
            raise TypeError(
                "with self_weight, src_weights must be a dict of ranks to weights, got "
                f"{type(self.src_weights).__name__}"
            )
        return self.self_weight, dict(self.src_weights)

    def _shift(
        self, window: Window, self_weight: float, weights: dict[int, float]
    ) -> tuple[float, dict[int, float]]:
        """Returns the weights after moving the weights of slots without writes to the rank itself.

        A slot without writes has the values of this rank's tensor from the construction of the window, which training
        or `broadcast_parameters` has changed since.
        """
        heard = self._heard.setdefault(window, set())
        if len(heard) < len(window.in_neighbors):
            # An update sets versions to 0, so ranks that were heard once are remembered.
            heard.update(rank for rank in window.in_neighbors if window.version(rank) > 0)
        unwritten = set(window.in_neighbors) - heard
        if unwritten.isdisjoint(weights):
            return self_weight, weights
        known = {rank: weight for rank, weight in weights.items() if rank not in unwritten}
        return self_weight + sum(weights[rank] for rank in unwritten if rank in weights), known


class WinPut(AsynchronousDiffusion):
    """Asynchronous diffusion by puts: a rank writes its parameters to its neighbors and averages its slots.

    At the end of a forward pass a rank puts its parameters into its slots at its out-neighbors, which take no part.
    `step` averages the parameters with the current values of the slots and then makes the optimizer's own step with the
    gradient of the old parameters. No rank waits for another one: the neighbors of a slow rank use its old parameters.

    The arguments are those of `WindowAlgorithm`.

    Attributes:
        dst_weights: {out-neighbor: weight} of the next put, or out-neighbors that all weigh 1; None for all
            of them. The slots at the others keep their values.
        self_weight, src_weights: Weights of the next average, both or none of them: of this rank's parameters
            and {in-neighbor: weight} of the slots. None for the topology's.
        force_barrier: As in `WindowAlgorithm`.
        skip_lost: As in `AsynchronousDiffusion`.
    """

    own_weights: ClassVar[tuple[str, ...]] = ("dst_weights", "self_weight", "src_weights")

    def send(self, window: Window) -> dist.Work:
        """See `WindowAlgorithm`."""
        return window.put(
            window.tensor,
            async_op=True,
            dst_weights=self.dst_weights,
            skip_lost=bool(self.skip_lost),
        )

    def _given_weights(self) -> tuple[float, dict[int, float]] | None:
        if self.self_weight is None and self.src_weights is not None:
            raise ValueError("self_weight and src_weights must be set together, got src_weights alone")
        return super()._given_weights()


class PullGet(AsynchronousDiffusion):
    """Asynchronous diffusion by gets: a rank reads its neighbors' parameters when it needs them.

    `step` gets the current parameters of the in-neighbors, which take no part, averages with them, and then makes the
    optimizer's own step with the gradient of the old parameters. Unlike `WinPut`, it does not use old parameters of the
    neighbors. (A get at the forward pass would make them older by a backward pass, which may be several steps of a
    neighbor.) A rank holds the mutexes of its windows while its optimizer changes the parameters, so no neighbor gets
    them half changed.

    The arguments are those of `WindowAlgorithm`.

    Attributes:
        src_weights: In-neighbors of the next get; None for all of them. Without `self_weight` a dict gives the factors
            by which the parameters are multiplied when they are fetched, and the topology's weights follow, as in
            BlueFog; an in-neighbor that is not in it counts with its values of an earlier get. With `self_weight` it is
            {in-neighbor: weight} of the average, and other in-neighbors do not count.
        self_weight: Weight of this rank's parameters in the next average; None for the topology's.
        force_barrier: As in `WindowAlgorithm`.
        skip_lost: As in `AsynchronousDiffusion`.
    """

    own_weights: ClassVar[tuple[str, ...]] = ("self_weight", "src_weights")

    def send(self, window: Window) -> dist.Work:
        """See `WindowAlgorithm`."""
        sources: Iterable[int] | Mapping[int, float] | None = self.src_weights
        given = self._given_weights()
        if given is not None:
            sources = list(given[1])
        return window.get(
            src_weights=sources, require_mutex=True, skip_lost=bool(self.skip_lost), async_op=True
        )

    def begin(self) -> None:
        """Only checks the weights. Values from a get at this time would be outdated in `step`."""
        self.check_weights()

    def finish(self) -> None:
        """Gets the current values of the neighbors and averages with them."""
        self.keep_pace()
        super().begin()
        self.take_all()

    def stepping(self) -> AbstractContextManager[None]:
        """Holds the mutexes of the windows."""
        return self._locking()

    @contextmanager
    def _locking(self) -> Iterator[None]:
        # This cannot deadlock: a rank that gets holds one mutex and waits for nothing else.
        with ExitStack() as stack:
            for window in (
                self.windows if self._pace is not None else []
            ):  # empty after the windows were freed
                stack.enter_context(window.lock())
            yield
            self.buckets.write_changes()
            self.buckets.load()  # releasing a lock waits for the device of the parameters

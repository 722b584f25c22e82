"""Asynchronous averaging by gets: each rank reads its neighbors' parameters when it needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ClassVar, cast

from torch.optim import Optimizer

from fogdist.buckets import BUCKET_CAP_MB
from fogdist.optim.window_optimizer import MixingOptimizer, make
from fogdist.optim.wrapper import Models
from fogdist.windows import Window


def DistributedPullGetOptimizer(
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> PullGetOptimizer:
    """Returns an optimizer that averages with its neighbors' present parameters: ``w+ = mean(w, w_j) - step(grad f(w))``.

    At the end of a forward pass a rank gets the parameters that its in-neighbors have then, who take no part;
    `step` averages with them and makes the optimizer's own step from there with the gradient of the old
    parameters. Unlike with `DistributedWinPutOptimizer` nothing is older than this rank's own iteration. A rank
    holds its windows' mutexes while its optimizer changes the parameters, so nobody gets them half changed.

    Arguments, errors and all else are as of `DistributedWinPutOptimizer`.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`,
        `unregister_window` and the attributes `src_weights`, `self_weight`, `force_barrier`, `skip_lost`.
    """
    made = make(PullGetOptimizer, optimizer, model, num_steps_per_communication, window_prefix, bucket_cap_mb)
    return cast("PullGetOptimizer", made)


class PullGetOptimizer(MixingOptimizer):
    """See `DistributedPullGetOptimizer`, which makes it.

    Attributes:
        src_weights: In-neighbors of the next get; None for all of them. Without `self_weight` a dict gives
            what the parameters are multiplied by as they are got, and the topology's weights follow, as in
            BlueFog; whoever is left out counts with what was got before. With `self_weight` it is {in-neighbor:
            weight} of the average, and nobody else counts.
        self_weight: Weight of this rank's parameters in the next average; None for the topology's.
        force_barrier: As in `WindowOptimizer`.
        skip_lost: As in `MixingOptimizer`.
    """

    _public: ClassVar[frozenset[str]] = frozenset(
        {"self_weight", "src_weights", "force_barrier", "skip_lost"}
    )
    _kind: ClassVar[str] = "pull_get"

    def _fog_send(self, window: Window) -> int:
        sources: Iterable[int] | Mapping[int, float] | None = self.src_weights
        given = self._fog_given_weights()
        if given is not None:
            sources = list(given[1])
        return window.get_nonblocking(src_weights=sources, require_mutex=True, skip_lost=bool(self.skip_lost))

    def _fog_stepping(self) -> AbstractContextManager[None]:
        return self._fog_locking()

    @contextmanager
    def _fog_locking(self) -> Iterator[None]:
        # Whoever gets holds one mutex, and waits for nothing else meanwhile.
        with ExitStack() as stack:
            for buckets in self._fog_each():
                for window in buckets.windows:
                    stack.enter_context(window.lock())
            yield  # a lock's end waits for the device, if it is one that steps

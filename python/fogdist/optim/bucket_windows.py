"""Parameters in flat buckets, each of which is the tensor of a window: neighbors write beside it, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.context import current
from fogdist.flat_buckets import FlatBuckets
from fogdist.windows import Window


class BucketWindows:
    """The windows of a list of parameters. Collective to make; `free` is collective too.

    Args:
        parameters: Alike on all ranks in number, shapes, dtypes, strides and types of device.
        names: Of the parameters, for messages.
        prefix: The windows are called by it and a number.
        first: Their first number.
        zero_init: As for `Window`.
        bucket_bytes: What a bucket takes, or one parameter that is larger.

    Raises:
        TypeError: As `FlatBuckets`.
        ValueError: As `FlatBuckets` and `Window`; ranks disagree on the parameters (on all ranks alike).

    Attributes:
        flats: Where the parameters are.
        windows: One for each bucket.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        prefix: str,
        first: int,
        *,
        zero_init: bool,
        bucket_bytes: int,
    ) -> None:
        self.flats = FlatBuckets(parameters, bucket_bytes, names=names, owner=self)
        with self.flats.released_on_error():
            check_same_everywhere(current().backend, "model", self.flats.layout())
            self.windows = [
                Window(flat, name=f"{prefix}.{number}", zero_init=zero_init)
                for number, flat in enumerate(self.flats.flats, first)
            ]

    def free(self) -> None:
        """Frees the windows, all of them even if it fails; the parameters stay in their buckets."""
        self.flats.release()
        error: Exception | None = None
        for window in self.windows:
            try:
                window.free()
            except RuntimeError as failure:
                error = error or failure
        if error is not None:
            raise error


class SlotsHeardOf:
    """Which slots of windows an in-neighbor or a get has written to; the others hold what they started with.

    A slot starts with what its owner's tensor was when the window was made. The tensor has changed since, by
    training or by `broadcast_parameters`, so until something has come the tensor itself stands for it.
    """

    def __init__(self) -> None:
        self._of: dict[Window, set[int]] = {}

    def shift(
        self, window: Window, self_weight: float, weights: dict[int, float]
    ) -> tuple[float, dict[int, float]]:
        """Returns the weights of an update of `window` with those of unwritten slots given to the rank itself."""
        heard = self._of.setdefault(window, set())
        if len(heard) < len(window.in_neighbors):
            # An update sets versions to 0, so what was seen once is kept.
            heard.update(rank for rank in window.in_neighbors if window.version(rank) > 0)
        unwritten = set(window.in_neighbors) - heard
        if unwritten.isdisjoint(weights):
            return self_weight, weights
        known = {rank: weight for rank, weight in weights.items() if rank not in unwritten}
        return self_weight + sum(weights[rank] for rank in unwritten if rank in weights), known

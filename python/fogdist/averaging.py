"""A weighted average in flight: from the tensors a user gave to what `wait` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fogdist.arguments import Tensors, deliver, weighted_list, writable
from fogdist.context import handles

# Hands tensors to the backend, with where their averages go: one for one, or None for new ones.
Submit = Callable[["Tensor | list[Tensor]", "Tensor | list[Tensor] | None"], dist.Work]


class Average:
    """Checks and prepares the tensors of one call.

    Args:
        tensors: One tensor, or a list or tuple of them.
        in_place: Whether results go into the tensors themselves.

    Attributes:
        sources: What is sent: the tensors, or copies whose memory is in order.

    Raises:
        TypeError: Not dense tensors.
        ValueError: An empty list, a dtype that has no weighted sums, or an expanded tensor to be overwritten.
    """

    def __init__(self, tensors: Tensors, in_place: bool) -> None:
        self.sources = weighted_list(tensors)
        self._single = isinstance(tensors, Tensor)
        self._targets: list[Tensor] | None = None
        if in_place:
            self._targets = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for place, target in enumerate(self._targets):
                writable(target, "tensor" if self._single else f"tensor[{place}]")

    def start(self, submit: Submit) -> int:
        """Returns the handle of the operation that `submit` starts."""
        sources = self.sources[0] if self._single else self.sources
        work = submit(sources, None if self._targets is None else sources)
        return handles().add(work, self._finish, *self.sources)

    def _finish(self, work: dist.Work) -> Any:
        if self._targets is None:
            results = work.get_future().value()
        else:
            results = [deliver(*pair) for pair in zip(self.sources, self._targets, strict=True)]
        return results[0] if self._single else results

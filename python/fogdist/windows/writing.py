"""What follows a put or an accumulate on the rank that called it: it keeps a share of what it sent.

In push-sum a rank divides its mass among its neighbors and itself; the shares must add up, in the tensor and
in p, to much better than the tensor's own precision, or a long run gains or loses mass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Elements that are scaled at a time: what is made of them on the way stays in the cache.
_CHUNK = 1 << 16


class Writing:
    """A put or an accumulate in flight, and what is to be done once it is complete.

    It waits as a torch.distributed.Work does; whoever first finds it complete, by `is_completed` or `wait`,
    does the rest. Nothing is done after an operation that failed.

    Args:
        work: The operation.
        then: What follows it.
    """

    def __init__(self, work: dist.Work, then: Callable[[], None]) -> None:
        self._work = work
        self._then: Callable[[], None] | None = then

    def is_completed(self) -> bool:
        """Returns whether the operation is complete, whether well or not."""
        if not self._work.is_completed():
            return False
        with contextlib.suppress(RuntimeError):  # whoever waits gets it
            self.wait()
        return True

    def wait(self) -> None:
        """Waits for the operation; raises what it failed with."""
        self._work.wait()
        self._finish()

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


@torch.no_grad()
def scale_(tensor: Tensor, weight: float) -> None:
    """Multiplies a tensor by a weight, in place.

    The weight counts as a double also for float32, and a product is rounded once. Integers go by way of
    doubles to the nearest integer, halves to the even one, and to the type's range.
    Weight 0.0 makes zeros of whatever there was.
    """
    target = tensor.detach()
    if weight == 0.0:
        target.zero_()
    elif target.dtype in (torch.float32, torch.complex64):
        factor = torch.tensor([weight], dtype=torch.float64)  # with a dimension: it makes the product a double
        for chunk in _chunks(target):
            torch.mul(chunk, factor, out=chunk)
    elif target.is_floating_point() or target.is_complex():
        target.mul_(weight)
    else:
        for chunk in _chunks(target):
            _scale_integers(chunk, weight)


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    if not tensor.is_contiguous():
        return [tensor]
    return [tensor.view(-1)] if tensor.numel() <= _CHUNK else torch.split(tensor.view(-1), _CHUNK)


def _scale_integers(chunk: Tensor, weight: float) -> None:
    limits = torch.iinfo(chunk.dtype)
    # In this order: the largest 64-bit integers are no doubles, and the next double above is out of range.
    scaled = (chunk.to(torch.float64) * weight).round_()
    above, below = scaled >= float(limits.max), scaled <= float(limits.min)
    rounded = scaled.masked_fill_(above | below, 0.0).to(chunk.dtype)
    chunk.copy_(torch.where(above, limits.max, torch.where(below, limits.min, rounded)))

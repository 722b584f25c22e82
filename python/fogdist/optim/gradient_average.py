"""The average of gradients over all ranks, bucket by bucket as a backward pass completes them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fogdist.buckets import Bucket, BucketCache
from fogdist.collectives import allreduce_nonblocking_, wait


@dataclass(frozen=True)
class _InFlight:
    """One bucket on its way.

    Attributes:
        flat: The gradients side by side, and after them one element a parameter: 1 where this rank has a
            gradient, else 0. Its average tells whether any rank has one.
        handle: Of the allreduce of `flat`.
        sent: The gradients that were packed, with their versions; None where there was none.
    """

    flat: Tensor
    handle: int
    sent: list[tuple[Tensor, int] | None]


class GradientAverage:
    """One average of the gradients of a list of parameters after the other.

    All ranks average the same buckets, whichever parameters have a gradient there; a missing gradient counts
    as zero.

    Args:
        name: What all ranks call it.

    Attributes:
        has_begun: Whether `begin` was called without `finish` or `discard`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._cache = BucketCache()
        self._parameters: list[Tensor] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._waiting_for: list[set[Tensor]] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._outdated: set[int] = set()
        self.has_begun = False
        self._has_warned = False

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Starts an average of the gradients of `parameters`."""
        self.has_begun = True
        # Backward passes complete the last parameters first.
        self._parameters = list(reversed(parameters))
        self._buckets = self._cache.of(self._parameters)
        self._bucket_of = {
            self._parameters[i]: n for n, bucket in enumerate(self._buckets) for i in bucket.places
        }
        self._waiting_for = [{self._parameters[i] for i in bucket.places} for bucket in self._buckets]

    def add(self, parameter: Tensor) -> None:
        """Takes note that the gradient of `parameter` is complete; sends its bucket if it is the last one."""
        number = self._bucket_of[parameter]
        self._waiting_for[number].discard(parameter)
        if not self._waiting_for[number]:
            self._send(number)

    def outdate(self, parameter: Tensor) -> None:
        """Takes note that `parameter` got more gradient: its bucket must be sent again."""
        if self._bucket_of[parameter] in self._in_flight:
            self._outdated.add(self._bucket_of[parameter])

    def finish(self) -> None:
        """Sends what was not sent, waits, and writes the average into the gradients.

        A parameter that has a gradient on any rank has one on all of them afterwards.
        """
        for number in sorted(self._outdated):
            wait(self._in_flight.pop(number).handle)
        for number, average in self._complete():
            wait(average.handle)
            self._write(self._buckets[number], average)

    def discard(self) -> None:
        """Sends what was not sent, as other ranks may have done already, waits, and forgets the average."""
        for _, average in self._complete():
            wait(average.handle)

    def _complete(self) -> list[tuple[int, _InFlight]]:
        """Sends what was not sent and returns all that is in flight, in order; the next average may begin."""
        for number in range(len(self._buckets)):
            if number not in self._in_flight:
                self._send(number)
        in_flight, self._in_flight = self._in_flight, {}
        self._outdated.clear()
        self.has_begun = False
        return sorted(in_flight.items())

    def _send(self, number: int) -> None:
        bucket = self._buckets[number]
        parameters = [self._parameters[place] for place in bucket.places]
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=bucket.dtype, device=bucket.device)
        *pieces, presence = torch.split(flat, [*sizes, len(sizes)])
        sent: list[tuple[Tensor, int] | None] = []
        for i, (parameter, piece) in enumerate(zip(parameters, pieces, strict=True)):
            gradient = parameter.grad
            if gradient is None:
                sent.append(None)
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"gradients must be dense to be averaged, got layout {gradient.layout} for a parameter "
                    f"of shape {tuple(parameter.shape)}; an embedding has sparse=False"
                )
            piece.view(parameter.shape).copy_(gradient.detach())
            presence[i] = 1
            sent.append((gradient, gradient._version))
        handle = allreduce_nonblocking_(flat, average=True, name=f"{self._name}.{number}")
        self._in_flight[number] = _InFlight(flat, handle, sent)

    def _write(self, bucket: Bucket, average: _InFlight) -> None:
        parameters = [self._parameters[place] for place in bucket.places]
        *pieces, presence = torch.split(average.flat, [*(p.numel() for p in parameters), len(parameters)])
        for parameter, piece, anywhere, sent in zip(
            parameters, pieces, presence.abs().tolist(), average.sent, strict=True
        ):
            gradient = parameter.grad
            if (gradient is None) != (sent is None) or (
                sent is not None and (gradient is not sent[0] or gradient._version != sent[1])
            ):
                self._warn_changed()
            if anywhere == 0:  # as in one process: no gradient, no step of this parameter
                continue
            if gradient is None:
                parameter.grad = piece.view(parameter.shape).clone()
            else:
                with torch.no_grad():
                    gradient.copy_(piece.view(parameter.shape))

    def _warn_changed(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "gradients were changed between backward() and step(), as by gradient clipping; their "
                "average replaces them. Call synchronize() before you change them.",
                stacklevel=5,
            )

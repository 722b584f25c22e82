"""The average of gradients over all ranks, bucket by bucket as a backward pass completes them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.agreement import check_same_everywhere
from fogdist.collectives import allreduce_nonblocking_, wait
from fogdist.context import Context, current, handles
from fogdist.membership import Seat
from fogdist.memory import empty_flat
from fogdist.packing import Bucket, are_same, make_buckets, signature_of
from fogdist.shards import is_sharded
from fogdist.streams import StreamJoin
from fogdist.warn import warn_user

# The backend remembers each name that it has seen, so the numbers in names repeat after this many steps.
_NUMBERS = 64


@dataclass(frozen=True)
class _InFlight:
    """A bucket whose average is in flight.

    Attributes:
        handle: The handle of the allreduce of the bucket's buffer; None if it could not begin.
        sent: The packed gradients with their versions; None for a parameter without a gradient.
        epoch: Of the membership in which it was sent.
        failure: Why it could not begin.
    """

    handle: int | None
    sent: list[tuple[Tensor, int] | None]
    epoch: int = 0
    failure: dist.DistBackendError | None = None

    def wait(self) -> None:
        """Waits for the average."""
        if self.failure is not None:
            raise self.failure
        assert self.handle is not None
        wait(self.handle)


class GradientExchange:
    """Successive averages of the gradients of a list of parameters.

    All ranks average the same buckets, even if different parameters have gradients; a missing gradient counts as zero.
    On the CPU a bucket is sent as soon as it is complete. On other devices operations have no names and must have the
    same order on all ranks, so a bucket also waits for those before it. The names of messages contain the number of the
    step, so a rank that averages once more within a step than the others gets an error instead of the values of the
    next step.

    Args:
        name: The same on all ranks.
        names: The names of the parameters, for messages.
        bucket_bytes: The largest size of a bucket with more than one gradient.
        group: The group of ranks; by default that of `init`.
        seat: The place in the averages, which are then repeated among the ranks that are left after a loss. An average counts
            once all these ranks have it, so all make their steps with the same gradients.

    Attributes:
        has_begun: Whether `begin` was called without `finish`, `discard` or `forget`.
    """

    def __init__(
        self,
        name: str,
        names: Mapping[Tensor, str],
        bucket_bytes: int | None,
        group: dist.ProcessGroup | None = None,
        seat: Seat | None = None,
    ) -> None:
        self._seat = seat
        self._name = name
        self._group = group
        self._names = names
        self._bucket_bytes = bucket_bytes
        self._parameters: list[Tensor] | None = None
        self._kinds: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._buckets: list[Bucket] = []
        # A buffer for each bucket has the gradients side by side. On the CPU one element per parameter follows, which
        # is 1 if this rank has a gradient and 0 if not; its average tells whether any rank has one. The host would have
        # to wait to read it from a device, so for devices the ranks exchange this apart from the buckets.
        self._flats: list[Tensor] = []
        self._members: list[list[Tensor]] = []  # the parameters of each bucket
        self._pieces: list[list[Tensor]] = []  # views of the buffers, like the gradients
        self._presences: list[Tensor] = []  # views of the elements that follow
        self._is_ordered = False
        self._complete: set[int] = set()
        self._next = 0
        self._joins: list[StreamJoin] = []
        # For buckets on devices, by parameter: whether any rank has a gradient.
        self._is_anywhere: list[bool] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._waiting_for: list[set[Tensor]] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._outdated: set[int] = set()
        self._step = 0
        self._begun_in_step = 0
        self.has_begun = False
        self._has_warned = False

    def hold(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Makes buckets for the gradients of `parameters`, which it returns in the order of the buckets.

        Collective if they differ from those of the last call.

        Raises:
            ValueError: Ranks hold different parameters (on all ranks alike).
        """
        # Backward passes complete the last parameters first.
        last_first = list(reversed(parameters))
        kinds = [(parameter.shape, parameter.dtype, parameter.device) for parameter in last_first]
        if self._parameters is not None and are_same(self._parameters, last_first) and kinds == self._kinds:
            return self._parameters
        for parameter in parameters:
            if is_sharded(parameter):
                raise TypeError(
                    f"{self._names[parameter]!r} must be an ordinary tensor for its gradient to be averaged over all "
                    "ranks, got a DTensor"
                )
        check_same_everywhere(
            self._context.backend,
            "model",
            [
                f"{place}: {self._names[parameter]!r}, {signature_of(parameter)}"
                for place, parameter in enumerate(parameters)
            ],
        )
        self._parameters, self._kinds = last_first, kinds
        self._buckets = make_buckets(last_first, self._bucket_bytes)
        self._flats, self._members, self._pieces, self._presences = [], [], [], []
        for bucket in self._buckets:
            parameters = [last_first[place] for place in bucket.places]
            lengths = [parameter.numel() for parameter in parameters]
            lengths.append(len(parameters) if bucket.device.type == "cpu" else 0)
            self._members.append(parameters)
            self._flats.append(empty_flat(sum(lengths), bucket.dtype, bucket.device))
            *pieces, presence = torch.split(self._flats[-1], lengths)
            self._pieces.append([piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)])
            self._presences.append(presence)
        self._is_ordered = any(bucket.device.type != "cpu" for bucket in self._buckets)
        self._joins = [StreamJoin(bucket.device) for bucket in self._buckets]
        self._bucket_of = {last_first[i]: n for n, bucket in enumerate(self._buckets) for i in bucket.places}
        return last_first

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Starts an average of the gradients of `parameters`; raises as `hold`."""
        held = self.hold(parameters)
        self._begun_in_step = (self._begun_in_step + 1) % _NUMBERS
        self.has_begun = True
        self._waiting_for = [{held[i] for i in bucket.places} for bucket in self._buckets]
        self._complete.clear()
        self._next = 0

    def add(self, parameter: Tensor) -> None:
        """Records that the gradient of `parameter` is complete. Sends its bucket if this completes it."""
        number = self._bucket_of[parameter]
        self._joins[number].add()
        self._waiting_for[number].discard(parameter)
        if self._waiting_for[number]:
            return
        if not self._is_ordered:
            self._send(number)
            return
        self._complete.add(number)
        while self._next in self._complete:
            self._send(self._next)
            self._next += 1

    def outdate(self, parameter: Tensor) -> None:
        """Records that the gradient of `parameter` changed after it was sent; all ranks resend it in `finish`."""
        if self._bucket_of[parameter] in self._in_flight:
            self._outdated.add(self._bucket_of[parameter])

    def finish(self) -> None:
        """Sends the remaining buckets, waits, and writes the average into the gradients.

        A parameter that has a gradient on any rank has one on all of them afterwards.
        """
        if self._seat is not None:
            for number, average in self._completed_among_the_living(self._seat):
                self._write(number, average)
            return
        self._send_missing()
        self._send_outdated()
        for number, average in self._completed():
            average.wait()
            self._write(number, average)

    def end_step(self) -> None:
        """Records that all ranks have made a step with the average."""
        self._step = (self._step + 1) % _NUMBERS
        self._begun_in_step = 0

    def discard(self) -> None:
        """Sends the remaining buckets, because other ranks may have sent them, waits, and drops the average."""
        if self._seat is not None:
            self._completed_among_the_living(self._seat)
            return
        self._send_missing()
        for _, average in self._completed():
            average.wait()

    def forget(self) -> None:
        """Drops the average in flight, if any, without waiting, because it is no longer needed."""
        for _, average in self._completed():
            if average.handle is not None:
                handles().forget(average.handle)

    def _completed_among_the_living(self, seat: Seat) -> list[tuple[int, _InFlight]]:
        """Waits for all buckets, again after each loss, until all ranks that are left have the same averages.

        Returns the buckets, and ends the average.

        The last operation of an average ends on a rank only if all ranks have come to it, and so have all buckets. If it ends
        on some rank and fails on others because of a loss, these have the averages too.
        """
        place = seat.take()
        try:
            while True:
                try:
                    self._complete_once(seat.epoch)
                    break
                except dist.DistBackendError as failure:
                    seat.meet(failure)
                    if seat.resume > place:
                        break
        except BaseException:
            self.forget()
            raise
        seat.completed = place + 1
        return self._completed()

    def _complete_once(self, epoch: int) -> None:
        self._withdraw(epoch)
        self._send_missing()
        self._send_outdated()
        for _, average in sorted(self._in_flight.items()):
            average.wait()
        done = torch.zeros(1, dtype=torch.int64, device="cpu")
        name = f"{self._label}.complete"
        self._context.backend.allreduce_named(done, dist.ReduceOp.MAX, name=name).wait()

    def _withdraw(self, epoch: int) -> None:
        """Forgets what was sent before the last loss; it is sent again."""
        for number, average in list(self._in_flight.items()):
            if average.epoch == epoch:
                continue
            del self._in_flight[number]
            self._outdated.discard(number)
            if average.handle is not None and handles().knows(average.handle):
                with contextlib.suppress(dist.DistBackendError):
                    average.wait()  # the buffer must not be in use

    def _send_outdated(self) -> None:
        for number in self._outdated_anywhere():
            self._in_flight[number].wait()
            self._send(number)

    def _send_missing(self) -> None:
        for number in range(len(self._buckets)):
            if number not in self._in_flight:
                self._send(number)

    def _outdated_anywhere(self) -> list[int]:
        """Returns the buckets that some rank must resend, which all ranks then resend.

        For buckets on devices, it also finds which parameters have a gradient on any rank.
        """
        if not self._buckets:
            return []
        count = len(self._buckets)
        flags = torch.zeros(count, device="cpu")
        flags[sorted(self._outdated)] = 1
        if self._is_ordered:
            flags = torch.cat([flags, torch.tensor(self._presence(), dtype=flags.dtype, device="cpu")])
        wait(
            allreduce_nonblocking_(
                flags, average=True, name=f"{self._label}.outdated", group=self._context.group
            )
        )
        anywhere = [flag > 0 for flag in flags.tolist()]
        self._is_anywhere = anywhere[count:]
        return [number for number, flag in enumerate(anywhere[:count]) if flag]

    def _presence(self) -> list[bool]:
        """Returns whether each parameter's gradient was sent, or would be sent now."""
        assert self._parameters is not None
        present = [parameter.grad is not None for parameter in self._parameters]
        for number, bucket in enumerate(self._buckets):
            for place, sent in zip(bucket.places, self._in_flight[number].sent, strict=True):
                present[place] = present[place] or sent is not None
        return present

    def _completed(self) -> list[tuple[int, _InFlight]]:
        """Ends the average and returns its buckets in flight, in order. The next average may begin then."""
        in_flight, self._in_flight = self._in_flight, {}
        self._outdated.clear()
        self.has_begun = False
        return sorted(in_flight.items())

    def _send(self, number: int) -> None:
        presence = self._presences[number]
        sent: list[tuple[Tensor, int] | None] = []
        gradients, places = [], []
        self._joins[number].join()
        for parameter, piece in zip(self._members[number], self._pieces[number], strict=True):
            gradient = parameter.grad
            if gradient is None:
                piece.zero_()
                sent.append(None)
                continue
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"gradients must be dense to be averaged, got layout {gradient.layout} for a parameter "
                    f"of shape {tuple(parameter.shape)}; an embedding has sparse=False"
                )
            gradients.append(gradient)
            places.append(piece)
            sent.append((gradient, gradient._version))
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(places, gradients)
        if presence.numel() > 0:
            arrived = [each is not None for each in sent]
            presence.copy_(torch.tensor(arrived, dtype=presence.dtype, device=presence.device))
        epoch = 0 if self._seat is None else self._seat.epoch
        name = f"{self._label}.{number}"
        try:
            handle = allreduce_nonblocking_(
                self._flats[number], average=True, name=name, group=self._context.group
            )
        except dist.DistBackendError as failure:
            if self._seat is None:
                raise
            self._in_flight[number] = _InFlight(None, sent, epoch, failure)
        else:
            self._in_flight[number] = _InFlight(handle, sent, epoch)

    def _write(self, number: int, average: _InFlight) -> None:
        presence = self._presences[number]
        if presence.numel() > 0:
            is_anywhere = [part != 0 for part in presence.abs().tolist()]
        else:
            is_anywhere = [self._is_anywhere[place] for place in self._buckets[number].places]
        gradients, averages = [], []
        for parameter, piece, anywhere, sent in zip(
            self._members[number], self._pieces[number], is_anywhere, average.sent, strict=True
        ):
            gradient = parameter.grad
            if (gradient is None) != (sent is None) or (
                sent is not None and (gradient is not sent[0] or gradient._version != sent[1])
            ):
                self._warn_changed()
            if not anywhere:  # as with a single process, a parameter without a gradient is not updated
                continue
            if gradient is None:
                parameter.grad = piece.clone()
            else:
                gradients.append(gradient)
                averages.append(piece)
        if gradients:
            with torch.no_grad():
                torch._foreach_copy_(gradients, averages)

    @property
    def _context(self) -> Context:
        return current(self._group) if self._seat is None else self._seat.context

    @property
    def _label(self) -> str:
        return f"{self._name}.{self._step}.{self._begun_in_step}"

    def _warn_changed(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn_user(
                "gradients were changed between backward() and step(), as by gradient clipping; their "
                "average replaces them. Call synchronize() before you change them."
            )

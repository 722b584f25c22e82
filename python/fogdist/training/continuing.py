"""Exchanges that survive the loss of ranks: `on_loss="continue"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fogdist.context import Context
from fogdist.elastic.participant import Participant
from fogdist.topology.healing import is_strongly_connected
from fogdist.training.mixing import Finish, Mixing, Round

if TYPE_CHECKING:
    from numpy.typing import NDArray

OnLoss: TypeAlias = Literal["raise", "continue"]


class Continuing(Mixing):
    """A mixing whose exchanges survive the loss of ranks.

    When an exchange fails, the rank agrees with the others on who is left (`fogdist.membership`). Then it repeats the
    exchange among them, with what is left of the topology. If other ranks had completed this exchange before the loss, it
    is given up instead: the rank keeps its own values, and goes on with the others in the exchange where they are. So no rank waits
    for an exchange that another one does not make, and a rank loses nothing but exchanges that it had not completed.

    Args:
        mixing: The mixing. Weights that users set before a round are not possible, as they may name lost ranks.
        participant: The place in the exchanges. Several mixings may have one, if their exchanges end in the order in which they
            begin.

    """

    def __init__(self, mixing: Mixing, participant: Participant) -> None:
        self._mixing = mixing
        self._participant = participant

    @property
    def exchanges(self) -> bool:  # type: ignore[override]  # that of the mixing
        """See `Mixing`."""
        return self._mixing.exchanges

    def __repr__(self) -> str:
        return f"{self._mixing!r} that goes on after losses"

    def items(self, context: Context) -> list[str]:
        """See `Mixing.items`."""
        return self._mixing.items(context)

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        return self._begin(self._mixing.begin, tensors, round, in_place)

    def begin_push(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin_push`."""
        return self._begin(self._mixing.begin_push, tensors, round, in_place)

    def _begin(
        self,
        start: Callable[[Sequence[Tensor], Round], Finish],
        tensors: Sequence[Tensor],
        round: Round,
        in_place: bool,
    ) -> Finish:
        # Not in place: the values are needed for another attempt.
        end = repeated(self._participant, lambda context: start(tensors, replace(round, context=context)))

        def finish() -> list[Tensor]:
            results = end()
            if not in_place:
                return [tensor.clone() for tensor in tensors] if results is None else results
            for tensor, result in zip(tensors, results or (), strict=False):
                tensor.copy_(result)
            return list(tensors)

        return finish


def repeated(
    participant: Participant, begin: Callable[[Context], Finish]
) -> Callable[[], list[Tensor] | None]:
    """Begins an exchange that is repeated after each loss of ranks, until it is complete or given up.

    Args:
        participant: The place in the exchanges.
        begin: Begins it in a group; what it sends must still be there when it is called again.

    Returns:
        A function that waits for the exchange and returns its results; None if it is given up, because other ranks have
        completed it before the loss. Such functions of one participant must be called in the order of the exchanges.
    """
    number = participant.take()

    # The epoch in which it is begun, and how to wait for it, or why it could not begin; None if it is given up.
    def attempt() -> tuple[int, Finish | dist.DistBackendError | None]:
        if number < participant.resume:
            return participant.epoch, None
        try:
            return participant.epoch, begin(participant.context)
        except dist.DistBackendError as failure:
            return participant.epoch, failure

    def completed(epoch: int, begun: Finish | dist.DistBackendError | None) -> list[Tensor] | None:
        while True:
            # An exchange of an earlier epoch does not count even if its result has arrived: the others repeat it.
            if epoch == participant.epoch:
                if begun is None:
                    return None
                try:
                    if isinstance(begun, dist.DistBackendError):
                        raise begun
                    results = begun()
                    _await_devices(participant.context, results)
                    return results
                except dist.DistBackendError as failure:
                    participant.agree(failure)
            epoch, begun = attempt()

    latest = [attempt()]

    def finish() -> list[Tensor] | None:
        results = completed(*latest.pop())
        participant.completed = number + 1
        return results

    return finish


def highest(
    context: Context, participant: Participant | None, numbers: Sequence[int], name: str
) -> list[int] | None:
    """Returns the largest of all ranks' numbers, place by place. Collective.

    Args:
        context: The group, for objects that do not go on after losses.
        participant: The place in the exchanges of one that does; then the ranks are those that are left.
        numbers: This rank's.
        name: Of the operation, the same on all ranks.

    Returns:
        The numbers; None if others had got them before a loss, so that this rank gives the exchange up.
    """

    def begin(context: Context) -> Finish:
        most = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        work = context.backend.allreduce_named(most, dist.ReduceOp.MAX, name=name)

        def finish() -> list[Tensor]:
            work.wait()
            return [most]

        return finish

    results = begin(context)() if participant is None else repeated(participant, begin)()
    return None if results is None else results[0].tolist()


class Watch:
    """The agreement rounds of ranks that go at their own pace. No exchange of theirs fails, so each step has to look.

    A rank goes on without lost neighbors until the graph falls apart without them, or until the group has failed, for
    example because another rank is in an agreement round already. Then it takes part; the participant's listener opens what the
    ranks that are left need.

    Args:
        participant: The object's.
        edges: Returns the graph of the present group, as a matrix of whether there is an edge.
    """

    def __init__(self, participant: Participant, edges: Callable[[], NDArray[np.bool_]]) -> None:
        self._participant = participant
        self._edges = edges
        # The ranks without which the graph of this epoch holds together.
        self._checked: tuple[int, frozenset[int]] = (participant.epoch, frozenset())

    def meet_if_needed(self) -> None:
        """Returns once the group works, and its graph holds together without the ranks that are gone.

        Raises:
            torch.distributed.DistBackendError: The group failed for another reason than a loss; and as `Participant.agree`.
        """
        while reason := self._reason():
            self._participant.agree(dist.DistBackendError(reason))  # raises if no rank is gone

    def _reason(self) -> str:
        backend = self._participant.context.backend
        if backend.failure:
            return backend.failure
        hosts, own = backend.hosts, backend.hosts[self._participant.context.rank]
        if silent := [rank for rank in backend.silent_ranks() if hosts[rank] != own]:
            return f"the ranks {silent} are silent, and may go on"  # one side only must
        gone = frozenset([*backend.lost_ranks(), *backend.left_ranks()])
        known = self._participant.epoch, gone
        if self._checked[0] != self._participant.epoch:
            # A graph that is apart from the beginning is the user's choice.
            self._checked = self._participant.epoch, frozenset()
        if known == self._checked or _holds_without(self._edges(), gone):
            self._checked = known
            return ""
        return f"the topology falls apart without the ranks {sorted(gone)}"


def _holds_without(edges: NDArray[np.bool_], gone: frozenset[int]) -> bool:
    """Returns whether all other ranks hear of each other."""
    rest = [rank for rank in range(len(edges)) if rank not in gone]
    return is_strongly_connected(edges[np.ix_(rest, rest)])


def _await_devices(context: Context, results: Sequence[Tensor] | None) -> None:
    """Waits for devices, whose operations the loss of a rank ends at any time: with undefined values, and without an error.

    Raises:
        torch.distributed.DistBackendError: A rank of the group is lost.
    """
    devices = {result.device for result in results or () if not result.is_cpu}
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()
    if devices and (lost := context.backend.lost_ranks()):
        raise dist.DistBackendError(f"rank {lost[0]} was lost")

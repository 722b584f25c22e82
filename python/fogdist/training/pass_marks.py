"""Ranges for profilers and the timeline that show when forward passes run and when gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module

from fogdist.observe.timeline import timeline_end_activity, timeline_start_activity


class PassMarks:
    """Marks training passes in the trace of ``torch.profiler`` and in the timeline.

    One range covers the forward pass and one the time from its end to the step. Operations of fog and the optimizer's
    step are in the trace in any case.

    Args:
        models: Their forward passes count in training mode with gradients enabled.
    """

    FORWARD = "fogdist.forward"
    GRADIENT = "fogdist.gradient"
    TRACK = "passes"

    def __init__(self, models: Sequence[Module]) -> None:
        from fogdist.training.pass_watch import PassWatch

        self._open: torch.profiler.record_function | None = None
        self._shown = False  # in the timeline, too
        self._watches = [
            watch
            for model in models
            for watch in (
                PassWatch(model, "before", self._begin, self.FORWARD),
                PassWatch(model, "after", self._begin, self.GRADIENT),
                PassWatch(model, "failed", self.end),  # a range left open would take in all that follows
            )
        ]

    def remove(self) -> None:
        """Ends the range that is open and marks nothing more."""
        self.end()
        for watch in self._watches:
            watch.remove()

    def end(self) -> None:
        """Ends the range that is open, if any: a step calls this when its gradients are there."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
            if self._shown:
                timeline_end_activity(self.TRACK)

    def _begin(self, name: str) -> None:
        self.end()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()  # type: ignore[no-untyped-call]
        self._shown = timeline_start_activity(self.TRACK, name.removeprefix("fogdist."))

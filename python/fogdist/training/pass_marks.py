"""Ranges for profilers and the timeline that show when forward passes run and when gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from fogdist.timeline import timeline_end_activity, timeline_start_activity


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
        from fogdist.training.forward_hook import ForwardHook

        self._open: torch.profiler.record_function | None = None
        self._shown = False  # in the timeline, too
        self._hooks: list[RemovableHandle] = []
        for model in models:
            before, after = ForwardHook(self._begin, self.FORWARD), ForwardHook(self._begin, self.GRADIENT)
            self._hooks.append(model.register_forward_pre_hook(before))
            # Also for a pass that raises: a range left open would take in all that follows.
            self._hooks.append(model.register_forward_hook(ForwardHook(self.end), always_call=True))
            self._hooks.append(model.register_forward_hook(after))

    def remove(self) -> None:
        """Ends the range that is open and marks nothing more."""
        self.end()
        for hook in self._hooks:
            hook.remove()

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

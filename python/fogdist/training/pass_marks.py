"""Ranges for profilers and the timeline that show when forward passes run and when gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.timeline import timeline_end_activity, timeline_start_activity


class PassMarks:
    """Marks training passes in the trace of ``torch.profiler`` and in the timeline.

    One range covers the forward pass and one the time from its end to the step. Operations of fog and the optimizer's
    step are in the trace in any case.

    Args:
        models: The models whose forward passes, in training mode with gradients enabled, are marked.
        optimizer: The optimizer whose step ends the second range.
    """

    FORWARD = "fogdist.forward"
    GRADIENT = "fogdist.gradient"
    TRACK = "passes"

    def __init__(self, models: Sequence[Module], optimizer: Optimizer) -> None:
        from fogdist.training.forward_hook import ForwardHook

        self._open: torch.profiler.record_function | None = None
        self._shown = False  # whether the open range is in the timeline too
        self._hooks = [optimizer.register_step_pre_hook(self._before_step)]
        for model in models:
            before, after = ForwardHook(self._begin, self.FORWARD), ForwardHook(self._begin, self.GRADIENT)
            self._hooks.append(model.register_forward_pre_hook(before))
            # Called even if the pass raises, because a range left open would include everything after it.
            self._hooks.append(model.register_forward_hook(ForwardHook(self._end), always_call=True))
            self._hooks.append(model.register_forward_hook(after))

    def remove(self) -> None:
        """Ends the open range and stops marking."""
        self._end()
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self._end()

    def _begin(self, name: str) -> None:
        self._end()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()  # type: ignore[no-untyped-call]
        self._shown = timeline_start_activity(self.TRACK, name.removeprefix("fogdist."))

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
            if self._shown:
                timeline_end_activity(self.TRACK)

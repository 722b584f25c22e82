"""Streams of devices of any kind: the order of work on a device, and when it is complete.

Data that reaches other ranks without the device, such as a number in a window of the CPU, would overtake the device's
pending work, so it must wait for a `Mark`. A CPU has no streams, and there it does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

# The seconds between two checks whether operations are complete.
_SLEEP = 50e-6


class Mark:
    """A point in the work of a device's current stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(current_stream(device))

    def wait(self) -> None:
        """Makes the host wait until the device has completed the work before the mark."""
        if self._event is not None:
            self._event.synchronize()


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream of a device; None for a CPU, and where torch knows no streams of that type."""
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.accelerator.current_stream(device)


def wait_until_complete(works: Sequence[dist.Work]) -> None:
    """Waits until operations are complete, even if `wait` only orders device work. It does not report failures."""
    while not all(work.is_completed() for work in works):
        time.sleep(_SLEEP)

"""The timeline: when each rank's operations, windows and training passes ran, as a file that Perfetto shows.

``FOG_TIMELINE=prefix`` (or ``BLUEFOG_TIMELINE``) records from the first process group on; `start` and `stop` record a
part of a program. Each rank writes ``prefix<rank>.json``, and `merge` combines these files into one, with one clock.
While no timeline is recorded, an operation only checks one flag. The engine records operations; here are their begin and
end, and the activities of Python.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fog_pg import _extension
from fogdist.observe.merging import merge

__all__ = [
    "is_on",
    "merge",
    "start",
    "stop",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# The open activities by the tensor's name, the innermost last, each with the time when it began.
_open: dict[str, list[tuple[str, int]]] = {}


def start(prefix: str) -> str:
    """Starts recording this rank's timeline, until `stop` or the end of the program.

    Args:
        prefix: The file name is `prefix`, the rank and ".json"; an existing file is overwritten. A prefix that ends in a
            separator is a folder, which must exist.

    Returns:
        The file's path.

    Raises:
        TypeError: `prefix` is not a string.
        ValueError: A timeline is being recorded, the file cannot be written, or there is no process group yet.
    """
    if not isinstance(prefix, (str, os.PathLike)):
        raise TypeError(f"prefix must be a str or a path, got {type(prefix).__name__}")
    if not dist.is_initialized():
        raise ValueError("a timeline needs the rank: call fogdist.init() or dist.init_process_group() first")
    extension = _extension.load()
    extension.start_timeline(os.fspath(prefix), dist.get_rank(), dist.get_world_size())
    path: str = extension.timeline_path()
    return path


def stop() -> None:
    """Ends the timeline and completes its file. Does nothing if no timeline is being recorded."""
    if is_on():
        _extension.load().stop_timeline()


def is_on() -> bool:
    """Returns whether a timeline is being recorded."""
    extension = sys.modules.get("fog_pg._C")  # without it there is no timeline
    return extension is not None and bool(extension.timeline_is_on())


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Begins an activity. Activities on the same track nest.

    Args:
        tensor_name: The track on which the activity is shown.
        activity_name: The name of the slice.

    Returns:
        Whether a timeline is being recorded; if not, the call does nothing.

    Raises:
        TypeError: A name is not a string.
    """
    _check_names(tensor_name, activity_name)
    if not is_on():
        return False
    _open.setdefault(tensor_name, []).append((activity_name, time.monotonic_ns()))
    return True


def timeline_end_activity(tensor_name: str) -> bool:
    """Ends the innermost activity on a track.

    Args:
        tensor_name: As in `timeline_start_activity`.

    Returns:
        Whether an activity was open.
    """
    activities = _open.get(tensor_name)
    if not activities:
        return False
    name, begin = activities.pop()
    _add(tensor_name, name, begin)
    return True


@contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """Records a block as an activity; arguments and errors as in `timeline_start_activity`."""
    _check_names(tensor_name, activity_name)
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        _add(tensor_name, activity_name, begin)


def shown_as(name: str) -> Callable[[_Function], _Function]:
    """Decorates a function so that its calls are slices of that name on the track "training"."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def shown(*arguments: Any, **options: Any) -> Any:
            if not is_on():
                return function(*arguments, **options)
            with timeline_context("training", name):
                return function(*arguments, **options)

        return shown  # type: ignore[return-value]

    return decorate


def _check_names(tensor_name: str, activity_name: str) -> None:
    for argument, name in (("tensor_name", tensor_name), ("activity_name", activity_name)):
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a str, got {type(name).__name__}")


def _add(track: str, name: str, begin: int) -> None:
    if is_on():
        # Without lone surrogates.
        readable = [text.encode("utf-8", "replace").decode() for text in (track, name)]
        _extension.load().add_to_timeline(*readable, begin, time.monotonic_ns())

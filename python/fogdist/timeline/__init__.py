"""The timeline: when each rank's operations, windows and training passes ran, as a file that Perfetto shows.

``FOG_TIMELINE=prefix`` (or ``BLUEFOG_TIMELINE``) records from the first process group on; `start` and `stop` record a
part of a program. Each rank writes ``prefix<rank>.json``, and `merge` combines these files into one, with one clock.
While no timeline is recorded, an operation only checks one flag.
"""

from __future__ import annotations

from fogdist.timeline.merging import merge
from fogdist.timeline.recording import (
    is_on,
    start,
    stop,
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)

__all__ = [
    "is_on",
    "merge",
    "start",
    "stop",
    "timeline_context",
    "timeline_end_activity",
    "timeline_start_activity",
]

"""The timeline: what each rank's operations, windows and training passes did when, as a file that Perfetto shows.

``FOG_TIMELINE=prefix`` (or ``BLUEFOG_TIMELINE``) records from the first process group on; `start` and `stop` do it for a part of
a program. Each rank writes ``prefix<rank>.json``, and `merge` makes one file of them, with one clock. While a timeline is
off, an operation looks at one flag.
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

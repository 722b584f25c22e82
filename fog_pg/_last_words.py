"""How a rank under `fog run` ends that raises because it has lost another one: in a line, after the other one.

Otherwise the ranks that fail because of another one print the most, and often end before it.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

from fog_pg import environment

# EX_TEMPFAIL of <sysexits.h>; `fog_cli.programs.rank` knows it, too.
_STATUS = 75
# The longest wait for the end of a process that was lost, in seconds, and the pauses between two samples.
_PATIENCE = 10.0
_PAUSE = 0.02
_LOST = re.compile(r" \(pid (?P<pid>\d+) on host (?P<host>[^)]*)\) (?:was lost|has ended|ended)\b")


@cache
def shorten() -> None:
    """Lets an exception about a lost rank that nothing catches end this process as this module says."""
    if not environment.RUN.get():
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import torch.distributed as dist

        lost = _LOST.search(str(error)) if isinstance(error, dist.DistBackendError) else None
        if lost is None:
            before(kind, error, trace)
            return
        if before is sys.__excepthook__:
            line = f"{_place(trace)}{kind.__name__}: {str(error).splitlines()[0]}"
            print(
                line, file=sys.__stderr__, flush=True
            )  # torch replaces the other one meanwhile, to prefix lines
        else:
            before(kind, error, trace)
        deadline = time.monotonic() + _PATIENCE
        is_here = lost["host"] == os.uname().nodename
        while is_here and _lives(int(lost["pid"])) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        sys.exit(_STATUS)

    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    """Returns the last place of the program in a traceback: outside of installed packages, if there is one."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if _is_of_program(frame)]
    if not frames:
        return ""
    frame, line = frames[-1]
    return f"{frame.f_code.co_filename}:{line}: "


def _is_of_program(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "fogdist", "fog_pg") and "site-packages" not in frame.f_code.co_filename


def _lives(pid: int) -> bool:
    """Whether a process of this host runs, and does not only wait for its parent to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

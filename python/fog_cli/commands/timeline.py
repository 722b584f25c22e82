"""`fog timeline`: merges the timelines of the ranks into one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fog_cli import UsageError

EXAMPLES = """\
examples:
  FOG_TIMELINE=/tmp/trace_ torchrun --nproc_per_node=4 script.py
  fog timeline merge /tmp/trace_ -o trace.json          all files that begin so
  fog timeline merge a/trace_0.json b/trace_1.json      of several hosts

Open the result at https://ui.perfetto.dev or in chrome://tracing.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    parser.add_argument(
        "action", choices=["merge"], help="write one timeline of those of several ranks, with one clock"
    )
    parser.add_argument("traces", nargs="+", metavar="PREFIX|FILE", help="the prefix, or the ranks' files")
    parser.add_argument(
        "-o",
        "--output",
        default="timeline.json",
        metavar="FILE",
        help="the file to write (default: timeline.json)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Merges the files."""
    from fogdist.observe.merging import merge

    traces: Any = arguments.traces
    if len(traces) == 1 and not Path(traces[0]).is_file():
        traces = traces[0]
    try:
        ranks = merge(traces, arguments.output)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
    print(f"{arguments.output}: {ranks} rank{'s' if ranks != 1 else ''}; open it at https://ui.perfetto.dev")
    return 0

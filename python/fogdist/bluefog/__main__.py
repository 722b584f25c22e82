"""Runs a script of BlueFog: ``torchrun --nproc_per_node=4 -m fogdist.bluefog script.py --its --arguments``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import fogdist.bluefog  # noqa: F401  opens the door

USAGE = "usage: python -m fogdist.bluefog script.py [arguments of the script]"


def main() -> None:
    """Runs the script that the command line names as ``__main__``, with its own arguments."""
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(
            f"{USAGE}\n\nRuns a script of BlueFog or asyncddp on fogdist, mostly under torchrun. See docs/bluefog.md."
        )
        return
    problem = "needs a script" if not arguments else f"{arguments[0]!r} is no file"
    if not arguments or not Path(arguments[0]).is_file():
        sys.exit(_complain(problem))
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as `python script.py` has it
    runpy.run_path(arguments[0], run_name="__main__")


def _complain(problem: str) -> int:
    print(f"fogdist.bluefog: error: {problem}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()

"""Runs a script of BlueFog: ``torchrun --nproc_per_node=4 -m fogdist.bluefog script.py --its --arguments``."""

from __future__ import annotations

import atexit
import runpy
import sys
from pathlib import Path

import fogdist.bluefog  # noqa: F401  finds its modules by BlueFog's names
from fogdist.bluefog.torch.basics import end

USAGE = "usage: python -m fogdist.bluefog script.py [arguments of the script]"


def main() -> None:
    """Runs the script that the command line names as ``__main__``, with its own arguments."""
    script, *_ = arguments = sys.argv[1:] or [""]
    if script in ("-h", "--help"):
        print(
            f"{USAGE}\n\nRuns a script of BlueFog or asyncddp on fogdist, mostly under torchrun: docs/bluefog.md."
        )
        return
    if not Path(script).is_file():
        problem = f"{script!r} is no file" if script else "needs a script"
        print(f"fogdist.bluefog: error: {problem}\n{USAGE}", file=sys.stderr)
        sys.exit(2)
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)  # as `python script.py` has it
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code:  # a rank that has failed waits for no other one
            atexit.unregister(end)
        raise


if __name__ == "__main__":
    main()

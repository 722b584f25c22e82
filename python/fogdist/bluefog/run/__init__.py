"""`bluefog.run`: `bfrun` is ``python -m fogdist.bluefog.run`` here, and `ibfrun` is `fogdist.interactive`; see docs/bluefog.md."""

from __future__ import annotations

from fogdist.bluefog.run import interactive_run, run

__all__ = ["interactive_run", "run"]

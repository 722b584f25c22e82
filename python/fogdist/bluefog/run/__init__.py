"""`bluefog.run`. `bfrun` is `fog run -m fogdist.bluefog` here, and `ibfrun` is `fogdist.interactive`; see docs/bluefog.md."""

from __future__ import annotations

from fogdist.bluefog.run import interactive_run

__all__ = ["interactive_run"]

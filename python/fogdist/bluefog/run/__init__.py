"""`bluefog.run`. Its launcher `bfrun` is `fog run -m fogdist.bluefog` here; docs/bluefog.md says more."""

from __future__ import annotations

from fogdist.bluefog.run import interactive_run

__all__ = ["interactive_run"]

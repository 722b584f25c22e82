"""`bluefog.common`."""

from __future__ import annotations

from fogdist.bluefog.common import basics, topology_util, util

__all__ = ["basics", "topology_util", "util"]

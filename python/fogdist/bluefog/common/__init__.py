"""`bluefog.common`."""

from __future__ import annotations

from fogdist.bluefog.common import topology_util, util

__all__ = ["topology_util", "util"]

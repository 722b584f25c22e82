"""`bluefog.common.basics`: the object whose methods were the functions about ranks and topologies."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["BlueFogBasics", "logger"]

logger = logging.getLogger("fogdist")


class BlueFogBasics:
    """Has the functions of `bluefog.torch` as its methods.

    Args:
        *path: Not used: BlueFog's library was a file there.
    """

    def __init__(self, *path: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        from fogdist.bluefog import torch

        return getattr(torch, name)

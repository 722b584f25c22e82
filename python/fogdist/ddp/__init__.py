"""Decentralized training of a module as it is: `DecentralizedDataParallel`, and its two ways to mix with neighbors."""

from __future__ import annotations

from fogdist.ddp.data_parallel import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel"]

"""Virtual ranks: decentralized training of 8 to thousands of ranks in one process, to see how many steps it takes.

One tensor holds all ranks' parameters, a row each; gradients come from ``torch.func.vmap``. Algorithms and topologies are
those of real ranks: only the exchange is another, a product with the mixing matrix (`VirtualRanks`). `train` is the loop,
and `Shards` gives ranks data that are alike or not. Time is no part of it: `benchmarks/time_to_loss.py` has steps to a
loss times the time of a step, which other benchmarks measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fogdist.removed import missing
from fogdist.simulate.algorithms import GradientAverage
from fogdist.simulate.model import StackedModel
from fogdist.simulate.ranks import VirtualRanks
from fogdist.simulate.shards import Shards
from fogdist.simulate.training import Result, train

__all__ = [
    "GradientAverage",
    "Result",
    "Shards",
    "StackedModel",
    "VirtualRanks",
    "train",
]

if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)

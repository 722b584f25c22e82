"""The frame of training: what is mixed, how, by which recursion, and when.

`buckets` has parameters as views of flat memory, which exchanges use where it is. `mixing` says whom ranks average
with, round by round, and `mixer` makes one exchange of buckets a round. `algorithm` is the frame of recursions, around
the optimizer's step; `overlapping` begins them with a forward pass, `window_algorithm` over one-sided windows,
`backward_steps` and `gradient_exchange` as gradients become ready. `view` is the user's optimizer with communication
around it. The rest says when: hooks, passes, a gradient scaler's steps.
"""

from __future__ import annotations

from fogdist.training.algorithm import Algorithm
from fogdist.training.buckets import FlatBuckets
from fogdist.training.mixer import Mixer
from fogdist.training.mixing import (
    DynamicWeights,
    GlobalAverage,
    Machines,
    Mixing,
    Neighbors,
    NoMixing,
    Round,
)
from fogdist.training.overlapping import OverlappingAlgorithm
from fogdist.training.window_algorithm import WindowAlgorithm

__all__ = [
    "Algorithm",
    "DynamicWeights",
    "FlatBuckets",
    "GlobalAverage",
    "Machines",
    "Mixer",
    "Mixing",
    "Neighbors",
    "NoMixing",
    "OverlappingAlgorithm",
    "Round",
    "WindowAlgorithm",
]

"""The frame of training algorithms: the tensors that are mixed, the mixing, the recursions and their timing.

`buckets` copies parameters to flat memory, which exchanges use in place, and back. `mixing` defines the peers and weights of
each round. `algorithm` is the frame of recursions around the optimizer's step. `overlapping` begins a round, one exchange of
the buckets, with a forward pass.
`fragments` exchanges the model in fragments while training goes on. `replicas` is for recursions that send compressed
differences. `view` wraps the user's optimizer and adds communication.
`pace` and `patient_mixer` have whom a rank waits for, `continuing` what happens after a loss, and `pass_watch` notices
forward passes. `shared_batches` gives each rank a part of the data by its speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fogdist.removed import missing
from fogdist.training.algorithm import Algorithm
from fogdist.training.buckets import FlatBuckets
from fogdist.training.fragments import FragmentedAlgorithm
from fogdist.training.mixing import (
    DynamicWeights,
    GlobalAverage,
    Machines,
    Mixing,
    Neighbors,
    NoMixing,
    Round,
)
from fogdist.training.overlapping import Mixer, OverlappingAlgorithm
from fogdist.training.replicas import ReplicaAlgorithm

__all__ = [
    "Algorithm",
    "DynamicWeights",
    "FlatBuckets",
    "FragmentedAlgorithm",
    "GlobalAverage",
    "Machines",
    "Mixer",
    "Mixing",
    "Neighbors",
    "NoMixing",
    "OverlappingAlgorithm",
    "ReplicaAlgorithm",
    "Round",
]

if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)

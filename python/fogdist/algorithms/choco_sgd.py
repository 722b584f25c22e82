"""CHOCO-SGD: gossip of compressed differences to replicas."""

from __future__ import annotations

from typing import ClassVar

from fogdist.training.replicas import ReplicaAlgorithm


class ChocoSGD(ReplicaAlgorithm):
    """CHOCO-SGD: ranks mix the replicas of their parameters, which follow by compressed differences.

    With the codec C and h, the replicas of x that a rank and its neighbors have::

        y  = x + d(x)
        h+ = h + C(y - h)
        x+ = y + gamma (W h+ - h+)

    (Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv 1902.00340, algorithm 2 in the memory-efficient form of its appendix;
    Koloskova, Lin, Stich and Jaggi, "Decentralized Deep Learning with Arbitrary Communication Compression", ICLR 2020,
    arXiv 1907.09356, with momentum.) The mean of all ranks is what it would be without compression, if W is doubly
    stochastic. With a learning rate of 0, ranks agree on the exact mean, whatever the codec loses. The paper begins at ``h
    = 0``; here h begins at the parameters, which costs nothing if all ranks begin with the same ones, and one uncompressed
    exchange otherwise. `fogdist.training.ReplicaAlgorithm` tells when else ranks exchange uncompressed.

    Too large a `gamma` diverges, and one that is too small mixes slowly: the more the codec loses, the smaller it has to
    be. docs/compression.md has values to begin with.

    Args:
        optimizer: As in `Algorithm`.
        model: As in `Algorithm`.
        compression: A codec of `fogdist.compression`, the same on all ranks.
        gamma: The consensus step size, more than 0 and at most 1.
        **options: As in `Algorithm`. `topology` must be a graph, a topology that is the same in all rounds, or None for
            the group's topology, which may be set anew between rounds. Weights cannot be set for a step.

    Raises:
        TypeError: `compression` is no codec; and as `Algorithm`.
        ValueError: `gamma` is out of its range; the codec or the mixing does not fit; and as `Algorithm`.
    """

    can_be_joined: ClassVar[bool] = True

    def combine(self) -> None:
        """See the class."""
        pulls = None if self.is_alone else self.follow(self.values)
        if pulls is not None:
            for x, pull in zip(self.values, pulls, strict=True):
                x.add_(pull, alpha=self.gamma)

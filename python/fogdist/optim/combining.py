"""What the optimizers that average parameters have in common: whom they average with, and its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from fogdist.optim.parameter_average import CommunicationType, NeighborWeights
from fogdist.optim.wrapper import DistributedOptimizer, setting


class CombiningOptimizer(DistributedOptimizer):
    """An optimizer that averages parameters.

    Attributes:
        self_weight, src_weights, dst_weights: Arguments of `neighbor_allreduce` for the next average; None
            for the topology. Set them before each iteration for a dynamic topology.
        src_machine_weights, dst_machine_weights: The same for `hierarchical_neighbor_allreduce`, together
            with `self_weight`; None for the machine topology.
        enable_topo_check: As of these operations; False by default, for speed.
    """

    _public: ClassVar[frozenset[str]] = frozenset(
        {
            "self_weight",
            "src_weights",
            "dst_weights",
            "src_machine_weights",
            "dst_machine_weights",
            "enable_topo_check",
            "communication_type",
        }
    )

    self_weight: float | None = setting(None)
    src_weights: Mapping[int, float] | None = setting(None)
    dst_weights: Iterable[int] | Mapping[int, float] | None = setting(None)
    src_machine_weights: Mapping[int, float] | None = setting(None)
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None = setting(None)
    enable_topo_check: bool = setting(False)
    _fog_communication_type: CommunicationType

    @property
    def communication_type(self) -> CommunicationType:
        """Whom parameters are averaged with; can be set between iterations, on all ranks alike."""
        return self._fog_communication_type

    @communication_type.setter
    def communication_type(self, value: CommunicationType) -> None:
        if not isinstance(value, CommunicationType):
            allowed = ", ".join(f"CommunicationType.{kind.name}" for kind in CommunicationType)
            raise TypeError(f"communication_type must be one of {allowed}, got {value!r}")
        self._fog_communication_type = value

    def _fog_weights(self) -> NeighborWeights:
        """The dynamic attributes.

        Raises:
            ValueError: Only those of the other kind of neighbors are set, so they would say nothing.
        """
        kind = self.communication_type
        ranks = self.src_weights is not None or self.dst_weights is not None
        machines = self.src_machine_weights is not None or self.dst_machine_weights is not None
        for given, other, without, right in (
            (ranks, machines, "hierarchical_neighbor_allreduce", "src_weights or dst_weights"),
            (machines, ranks, "neighbor_allreduce", "src_machine_weights or dst_machine_weights"),
        ):
            if given and not other and kind.name == without:
                raise ValueError(
                    f"{right} must not be the only weights set with {kind}, which does not use them"
                )
        return NeighborWeights(
            self.self_weight,
            self.src_weights,
            self.dst_weights,
            self.enable_topo_check,
            self.src_machine_weights,
            self.dst_machine_weights,
        )

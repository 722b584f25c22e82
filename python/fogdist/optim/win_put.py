"""Asynchronous averaging by puts: each rank writes its parameters to its neighbors and averages what it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, cast

from torch.optim import Optimizer

from fogdist.buckets import BUCKET_CAP_MB
from fogdist.optim.window_optimizer import MixingOptimizer, make
from fogdist.optim.wrapper import Models, setting
from fogdist.windows import Window


def DistributedWinPutOptimizer(
    optimizer: Optimizer,
    model: Models,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> WinPutOptimizer:
    """Returns an optimizer that averages with what its neighbors last sent: ``w+ = mean(w, slots) - step(grad f(w))``.

    At the end of a forward pass a rank puts its parameters into its slots at its out-neighbors, who take no
    part. `step` averages the parameters with what is in the slots here, whenever that came, and makes the
    optimizer's own step from there with the gradient of the old parameters. Nobody waits for anybody: a slow rank
    is seen with old parameters, and a rank that nobody has written to yet takes itself in their place.
    (Asynchronous diffusion: Zhao and Sayed, "Asynchronous adaptation and learning over networks", IEEE
    Transactions on Signal Processing 63, 2015.)

    The parameters become views of flat buckets, each the tensor of a window; see `fogdist.flat_buckets`. While there
    are windows the topology stays. They are freed by `unregister_window`, which is collective, or end with
    `fogdist.shutdown`; dropping the optimizer does not free them.

    Only forward passes in training mode with gradients enabled count, and the model must be called as a
    function, not by its `forward` method; a step without any such pass exchanges on the spot.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All parameters that are trained now are
            averaged, buffers are not.
        num_steps_per_communication: J: an exchange every J forward passes of the model.
        window_prefix: What the names of the windows begin with, alike on all ranks; by default a new name.
        bucket_cap_mb: MiB of the buffers that the parameters live in, each of which is a window. A larger
            parameter has one for itself.

    Returns:
        An instance of the optimizer's class with `step` as above, `synchronize`, `skip_synchronize`,
        `unregister_window` and the attributes `dst_weights`, `self_weight`, `src_weights`, `force_barrier`,
        `skip_lost`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: `optimizer` is an LBFGS, is distributed already or has a parameter that is not in the
            model; two parameters have the same name or overlap in memory; one is held by another living
            optimizer or wrapper; `num_steps_per_communication` is below 1, `bucket_cap_mb` not above 0; there
            are windows of this prefix; ranks have other models (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """
    made = make(WinPutOptimizer, optimizer, model, num_steps_per_communication, window_prefix, bucket_cap_mb)
    return cast("WinPutOptimizer", made)


class WinPutOptimizer(MixingOptimizer):
    """See `DistributedWinPutOptimizer`, which makes it.

    Attributes:
        dst_weights: {out-neighbor: weight} of the next put, or out-neighbors that all weigh 1; None for all
            of them. Whoever is left out keeps what it has.
        self_weight, src_weights: Weights of the next average, both or none of them: of this rank's parameters
            and {in-neighbor: weight} of what they sent. None for the topology's.
        force_barrier: As in `WindowOptimizer`.
        skip_lost: As in `MixingOptimizer`.
    """

    _public: ClassVar[frozenset[str]] = frozenset(
        {"dst_weights", "self_weight", "src_weights", "force_barrier", "skip_lost"}
    )
    _kind: ClassVar[str] = "win_put"

    dst_weights: Iterable[int] | Mapping[int, float] | None = setting(None)

    def _fog_send(self, window: Window) -> int:
        return window.put_nonblocking(
            window.tensor, dst_weights=self.dst_weights, skip_lost=bool(self.skip_lost)
        )

    def _fog_given_weights(self) -> tuple[float, dict[int, float]] | None:
        if self.self_weight is None and self.src_weights is not None:
            raise ValueError("self_weight and src_weights must be set together, got src_weights alone")
        return super()._fog_given_weights()

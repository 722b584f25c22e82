"""A model of all ranks at once: its parameters are stacked, and a pass is that of each rank with its own batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fogdist.training.algorithm import check_count

if TYPE_CHECKING:
    from typing_extensions import Self


class StackedModel(nn.Module):
    """A model with parameters for each rank, and forward passes of all ranks by ``torch.func.vmap``.

    All trained parameters are in one, `stacked`, of shape (ranks, elements): row r is rank r's. So the step of an optimizer
    that treats each element by itself (SGD with momentum, Adam, AdamW, RMSprop) is the step of each rank's own optimizer.
    An optimizer that looks at whole parameters is not (LARS, Adafactor, Muon, LBFGS), nor is clipping by a norm.
    Frozen parameters and buffers are the same on all ranks. Dropout differs between ranks.

    Args:
        model: The model that all ranks start from; it is copied. A rank's gradient must depend on its own batch and
            parameters only, and a pass must change nothing but its results.
        ranks: Number of ranks, at least 1.

    Attributes:
        stacked: The parameters, of shape (ranks, elements of all trained parameters).

    Raises:
        TypeError: `model` is not a torch.nn.Module, or `ranks` not an int.
        ValueError: `ranks` is below 1; no parameter is trained, or they have several dtypes or devices, or others than
            float32 and float64.
    """

    stacked: nn.Parameter

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_count(ranks, "ranks")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        kinds = {(p.dtype, p.device) for p in trained.values()}
        if len(kinds) != 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
            shown = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
            raise ValueError(
                f"model must have trained parameters, all float32 or all float64 on one device, got {shown}"
            )
        self.ranks = ranks
        # Not a module of this one: its parameters are not trained.
        self._model = (copy.deepcopy(model),)
        self._shapes = {name: p.shape for name, p in trained.items()}
        row = torch.cat([p.detach().reshape(-1) for p in trained.values()])
        self._lengths = [p.numel() for p in trained.values()]
        self.stacked = nn.Parameter(row.repeat(ranks, 1))

    def forward(self, *inputs: Tensor) -> Any:
        """Returns what each rank's model makes of its inputs.

        Args:
            *inputs: What the model takes, of shape (ranks, ...) each.

        Returns:
            The model's result with a leading dimension of ranks.

        Raises:
            ValueError: In training mode, the model has a layer that keeps statistics of batches, such as BatchNorm; or
                an input has not as many rows as there are ranks.
        """
        if self.training:
            self.check_statistics()
        for place, each in enumerate(inputs):
            if each.ndim == 0 or len(each) != self.ranks:
                raise ValueError(
                    f"inputs[{place}] must have a row for each of {self.ranks} ranks, got shape {tuple(each.shape)}"
                )

        def call(parameters: dict[str, Tensor], *own: Tensor) -> Any:
            return torch.func.functional_call(self._model[0], parameters, own)

        return torch.func.vmap(call, randomness="different")(self.parameters_of_ranks(), *inputs)

    def parameters_of_ranks(self) -> dict[str, Tensor]:
        """Returns the trained parameters by name, views of `stacked` of shape (ranks, *shape) each."""
        parts = torch.split(self.stacked, self._lengths, dim=1)
        return {
            name: part.reshape(self.ranks, *shape)
            for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)
        }

    @torch.no_grad()
    def model_of(self, rank: int | None = None) -> nn.Module:
        """Returns a copy of the model with a rank's parameters; None for the mean of all ranks."""
        model = copy.deepcopy(self._model[0])
        named = dict(model.named_parameters())
        for name, rows in self.parameters_of_ranks().items():
            named[name].copy_(rows.mean(dim=0) if rank is None else rows[rank])
        return model

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Returns how far the ranks are from their mean, as `fogdist.consensus_distance`."""
        rows = self.stacked.double() if self.stacked.numel() < 1 << 22 else self.stacked
        return float((rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt())

    def train(self, mode: bool = True) -> Self:
        """Sets training mode, of the ranks' model too."""
        self._model[0].train(mode)
        return super().train(mode)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; afterwards each layer has its own mode again."""
        modes = [(layer, layer.training) for layer in (self, *self._model[0].modules())]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, mode in modes:
                layer.training = mode

    def check_statistics(self) -> None:
        """Raises ValueError if a layer takes statistics of its training batches, which would be those of all ranks."""
        for name, layer in self._model[0].named_modules():
            if (
                layer.training
                and isinstance(layer, _NormBase)
                and (isinstance(layer, _BatchNorm) or layer.track_running_stats)
            ):
                raise ValueError(
                    "model must have no layer with statistics of batches for virtual ranks, got "
                    f"{type(layer).__name__} {name!r} in training mode: take GroupNorm or LayerNorm, or set that layer "
                    "to eval()"
                )

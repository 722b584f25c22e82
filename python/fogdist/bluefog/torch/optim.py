"""`bluefog.torch.optim` of asyncddp: functions that make optimizers and schedules, and Adam over several batches.

The functions take pairs of name and parameter; ``functools.partial`` sets the rest. Weight decay is for parameters of two
dimensions or more: biases and the parameters of normalizations have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

Named = Iterable[tuple[str, Tensor]]


class AccumAdam(Optimizer):
    """Adam whose moments take in the mean gradient of every `accum_iter` steps.

    A step in between updates with the moments as they would be if its own gradient were that mean, so no step waits,
    and the moments have less noise than one batch has. With ``accum_iter=1`` it is `torch.optim.Adam`, whose
    arguments the others are. The scheme is Decent-DP's (Wang et al., ICLR 2025, arXiv 2410.11998).
    """

    _is_decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        if accum_iter < 1:
            raise ValueError(f"accum_iter must be at least 1, got {accum_iter}")
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step; returns what the closure returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, count = self.state[parameter], group["accum_iter"]
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq", "accum_grad"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self._is_decoupled:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["step"] += 1
        state["accum_grad"].add_(gradient, alpha=1 / count)
        first = state["exp_avg"].lerp(gradient, 1 - beta1)
        second = (state["exp_avg_sq"] * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        commits = -(-state["step"] // count)  # this one included
        divisor = (second / (1 - beta2**commits)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(first, divisor, value=-group["lr"] / (1 - beta1**commits))
        if state["step"] % count == 0:
            mean = state["accum_grad"]
            state["exp_avg"].lerp_(mean, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            mean.zero_()


class AccumAdamW(AccumAdam):
    """`AccumAdam` with weight decay as in AdamW: the parameters are multiplied by ``1 - lr * weight_decay``."""

    _is_decoupled: ClassVar[bool] = True


def _optim_fn(kind: type[Optimizer], weight_decay: float, *order: str) -> Callable[..., Any]:
    """Returns a function of named parameters, and of these arguments after the learning rate and the betas."""

    def make(
        params: Named, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, *more: Any, **options: Any
    ) -> Any:
        if len(more) > len(order):
            raise TypeError(f"at most {4 + len(order)} arguments are taken by position, got {4 + len(more)}")
        options = {"weight_decay": weight_decay, **dict(zip(order, more, strict=False)), **options}
        groups = _groups(params, options.pop("weight_decay"))
        return kind(groups, lr=lr, betas=(beta1, beta2), **options)  # type: ignore[call-arg]

    make.__doc__ = f"Returns `{kind.__name__}` of named parameters; further arguments are {', '.join(order)}."
    return make


_LAST = "eps", "weight_decay", "accum_iter"
optim_fn_adam = _optim_fn(torch.optim.Adam, 1 / 32768, "weight_decay", "eps")
optim_fn_adamw = _optim_fn(torch.optim.AdamW, 0.1, "weight_decay", "eps")
optim_fn_accum_adam = _optim_fn(AccumAdam, 1 / 32768, *_LAST)
optim_fn_accum_adamw = _optim_fn(AccumAdamW, 0.1, *_LAST)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """Returns a schedule that goes up along a line for `t_warmup` steps, and then down along a cosine for `t_max`.

    It begins with the share `warmup_decay` of the optimizer's learning rate, and ends with `cosine_eta_min`.
    """
    warmup = LinearLR(optimizer, start_factor=warmup_decay, total_iters=t_warmup)
    cosine = CosineAnnealingLR(optimizer, T_max=t_max, eta_min=cosine_eta_min)
    return SequentialLR(optimizer, schedulers=[warmup, cosine], milestones=[t_warmup])


def _groups(params: Named, weight_decay: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for _, tensor in params:
        groups[tensor.dim() <= 1]["params"].append(tensor)
    return [group for group in groups if group["params"]]

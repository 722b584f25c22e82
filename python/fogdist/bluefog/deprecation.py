"""Warnings about renamed functions, issued once per process so that they do not fill the output of a training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


@cache
def warn_once(message: str) -> None:
    """Issues a DeprecationWarning, unless the same one was issued before."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def deprecated_function_arg(arg_name: str, fix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a decorator, `bluefog.torch.utility`'s: calls with a keyword of this name raise TypeError with the advice."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if arg_name in options:
                raise TypeError(f"{arg_name} is deprecated in {function.__name__}: {fix}")
            return function(*arguments, **options)

        return call

    return decorate

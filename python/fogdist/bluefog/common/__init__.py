"""`bluefog.common`, and as its modules `basics` and `util`: variables for a block, and what asked for BlueFog's library."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("fogdist")


class BlueFogBasics:
    """Has the functions of `bluefog.torch` as its methods. `path` is not used: BlueFog's library was a file there."""

    def __init__(self, *path: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        from fogdist.bluefog import torch

        return getattr(torch, name)


def check_extension(ext_name: str, pkg_path: str, *args: str) -> None:
    """Does nothing: `fogdist.init` says what is wrong if fog was not built."""


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for a block; afterwards they are as before. None leaves a variable as it is."""
    values = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update(before)

"""`bluefog.common.util`: environment variables for a block, and what asked for BlueFog's library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def check_extension(ext_name: str, pkg_path: str, *args: str) -> None:
    """Does nothing: `fogdist.init` says what is wrong if fog was not built."""


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for a block; afterwards they are as before.

    Args:
        **variables: Values by name; None leaves a variable as it is.
    """
    values = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

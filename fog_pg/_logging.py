"""The loggers "fogdist" and "fog_pg": quiet by default, a rank in each line, and the same level for the C++ code.

If the program has given the root logger handlers, records only go there, with an attribute `rank` for its formats.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

from fog_pg import environment

_LOGGERS = ("fogdist", "fog_pg")


def rank_of_process() -> str:
    """Returns this process's rank; "-" if it is not known yet."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    names = (environment.RANK, environment.PMI_RANK, environment.OPEN_MPI_RANK)
    return next((str(variable.get()) for variable in names if variable.is_set()), "-")


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints on standard error, unless the program has handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)  # the current one: tests and notebooks replace it
            super().emit(record)


def _add_rank(record: logging.LogRecord) -> bool:
    record.rank = rank_of_process()
    return True


@cache
def set_up() -> None:
    """Gives the loggers their level and handler, once per process.

    Raises:
        ValueError: FOG_LOG_LEVEL is not a level.
    """
    level = environment.LOG_LEVEL.get().upper()
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s [rank %(rank)s] %(levelname)s %(name)s: %(message)s"))
    handler.addFilter(_add_rank)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:  # the program may have set one
            logger.setLevel(level)
        logger.addHandler(handler)
    if environment.LOG_LEVEL.is_set() and not environment.CPP_LOG_LEVEL.is_set():
        os.environ[environment.CPP_LOG_LEVEL.name] = "INFO" if level == "DEBUG" else level

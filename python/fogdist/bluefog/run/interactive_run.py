"""`bluefog.run.interactive_run`: notebooks, whose ranks are engines of ipyparallel."""

from __future__ import annotations

from typing import NoReturn


def interrupt_hanged_processes(profile: str = "bluefog") -> NoReturn:
    """Would interrupt the engines that `ibfrun` started, which fogdist does not have.

    Whoever starts engines interrupts them: ``cluster.signal_engines_sync(signal.SIGINT)`` of ipyparallel. An operation of
    fogdist ends then with KeyboardInterrupt, and otherwise at the group's timeout with an error that names the missing rank.

    Raises:
        NotImplementedError: Always, with this advice.
    """
    raise NotImplementedError(
        f"fogdist has started no engines of profile {profile!r}; interrupt them with ipyparallel: "
        "cluster.signal_engines_sync(signal.SIGINT)"
    )

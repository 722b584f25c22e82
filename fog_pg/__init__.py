"""Registers the torch.distributed backend "fog".

Importing this package loads no library; the first group loads the C++ extension and MPI.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fog_pg._C import ProcessGroupFog

__all__ = ["Part", "autoload", "register"]


class Part(NamedTuple):
    """The `pg_options` of a group of some ranks of another one, which may have failed: it needs no rendezvous.

    Attributes:
        whole: The backend of the other group.
        ranks: Ranks of that group, this one among them.
        number: Used once with that group.
    """

    whole: ProcessGroupFog
    ranks: list[int]
    number: int


def register() -> None:
    """Registers "fog" for the device types cpu and cuda; a second call does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or "FOG" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("fog", _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Called by torch 2.11 to 2.13 at the end of "import torch". An exception here would break that import."""
    register()


def _create(options: Any, backend_options: Any = None) -> ProcessGroupFog:
    """Creates the backend of one group; torch calls it on every rank of the group."""
    import logging

    import torch.distributed as dist

    from fog_pg import _joining, _known, _last_words, _settings, _standby, _store, _timeouts, environment
    from fog_pg._extension import confirm_by_default, load

    extension = load()
    _settings.apply(extension)  # a program may have changed the environment since the last group
    part = backend_options if isinstance(backend_options, Part) else None
    if part is not None:
        backend_options = part.whole.options  # a copy
    elif backend_options is None:
        backend_options = extension.ProcessGroupFog.Options()
        backend_options.confirm = confirm_by_default()
    elif isinstance(backend_options, extension.ProcessGroupFog.Options):
        backend_options = copy.deepcopy(backend_options)  # the caller may use the options for several groups
    else:
        raise TypeError(
            f"pg_options: got {type(backend_options).__name__}; allowed for backend fog is ProcessGroupFog.Options"
        )
    # The arguments of init_process_group and new_group take precedence, as with torch's own backends.
    backend_options._timeout = _timeouts.within_reach(options.timeout)
    backend_options.group_name = str(options.group_id)
    backend_options.global_ranks_in_group = list(options.global_ranks_in_group)
    if getattr(options, "enable_reconfigure", False):  # torch 2.14 and later
        backend_options.enable_reconfigure = True
    if part is not None:
        return part.whole.part(part.ranks, part.number, options.store, backend_options)
    # In groups after torch's first, group_rank is not the process's rank.
    is_first = not dist.is_initialized()
    extension.observe_as(
        options.group_rank if is_first else dist.get_rank(),
        options.group_size if is_first else dist.get_world_size(),
        os.path.basename(sys.argv[0]) if sys.argv else "",
    )
    _store.limit_silence(options.store, environment.HOST_TIMEOUT.get())
    if is_first:
        _last_words.shorten()
        _joining.check_max_ranks(options.group_size)
    backend: ProcessGroupFog
    standby = None
    if is_first and options.group_size > 1 and _joining.wants_to_join():
        standby = _standby.find()
        backend = _joining.begin(extension, options, backend_options, standby)
    else:
        if is_first and options.group_size > 1:
            standby = _standby.begin(options.store, options.group_rank)
        known = (None, []) if is_first else _known.acquaintance(backend_options.global_ranks_in_group)
        backend = extension.ProcessGroupFog(
            options.store, options.group_rank, options.group_size, backend_options, *known
        )
    if is_first:
        extension.note_job(backend.id)
        _joining.note_first(backend, options.store, standby)
    logging.getLogger("fog_pg").debug(
        "group %s: rank %d of %d, timeout %s",
        backend_options.group_name,
        options.group_rank,
        options.group_size,
        options.timeout,
    )
    return backend


register()

"""Passes the values of environment variables to the C++ code, which reads none of fog's itself."""

from __future__ import annotations

from typing import Any

from fog_pg import environment


def launcher_world() -> tuple[int, int] | None:
    """Returns this process's rank and size from mpiexec or srun; None if torchrun or no launcher started it."""
    # Workers of torchrun inherit the variables of the launcher that started torchrun itself. These describe another
    # world.
    if environment.TORCHELASTIC_RUN_ID.is_set():
        return None
    worlds = [
        (environment.PMI_RANK, environment.PMI_SIZE),
        (environment.OPEN_MPI_RANK, environment.OPEN_MPI_SIZE),
    ]
    # A batch shell has Slurm's variables as well; only a rank that srun started also has access to a PMI.
    if environment.PMI_FD.is_set() or environment.PMIX_RANK.is_set():
        worlds.append((environment.SLURM_RANK, environment.SLURM_SIZE))
    return next(((rank.get(), size.get()) for rank, size in worlds if 0 <= rank.get() < size.get()), None)


def apply(extension: Any) -> None:
    """Reads the variables now, for groups that are made from now on.

    Raises:
        ValueError: A variable of `fog_pg.environment` has a value that is not allowed.
    """
    environment.check()
    settings = extension.Settings()
    settings.between_hosts = environment.BETWEEN_HOSTS.get()
    settings.interface = environment.INTERFACE.get()
    settings.job_secret = environment.JOB_SECRET.get()
    settings.timeline = environment.TIMELINE.get() or environment.BLUEFOG_TIMELINE.get()
    settings.local_links = environment.LOCAL_LINKS.get()
    settings.connections = environment.CONNECTIONS.get()
    settings.rma_bytes = environment.RMA_BYTES.get()
    settings.host_timeout = environment.HOST_TIMEOUT.get()
    settings.warn_after = environment.WARN_AFTER.get()
    settings.lost_after = environment.LOST_AFTER.get()
    settings.max_ranks = environment.MAX_RANKS.get()
    sizes = (environment.LOCAL_WORLD_SIZE, environment.MPICH_LOCAL_SIZE, environment.OPEN_MPI_LOCAL_SIZE)
    settings.local_ranks = next((size.get() for size in sizes if size.get() > 0), 0)
    settings.launcher_rank, settings.launcher_size = launcher_world() or (0, 0)
    extension.set_settings(settings)

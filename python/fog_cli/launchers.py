"""The command that starts the ranks, for each launcher. Pure functions: nothing is started here."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fog_cli import UsageError
from fog_cli.hosts import Host

# What stands before the words of a rank's own command: it puts the rank before each line of its output.
RANK = [sys.executable, "-m", "fog_cli.programs.rank"]
LOCAL_RANKS = [sys.executable, "-m", "fog_cli.programs.local_ranks"]

# Of Open MPI, which passes on only what it is told. These say something about the host that it is started on.
_NOT_PASSED_ON = re.compile(r"(BASH_FUNC_.*|OMPI_.*|PMIX_.*|PRTE_.*|HOSTNAME|PWD|OLDPWD|SHLVL|_)")


@dataclass(frozen=True)
class Job:
    """What `fog run` is asked for, checked.

    Attributes:
        ranks: How many.
        hosts: The hosts with the ranks of each, in the order of ranks, except under srun; one is this machine.
        command: A rank's command.
        environment: All variables of the ranks.
        ssh_port: None for ssh's own.
        interface: Network interface; None to leave it to the programs.
        prefix: Words before the launcher.
        flags: More words for an MPI launcher or srun.
        as_root: Whether the user is root, which Open MPI wants to be told.
    """

    ranks: int
    hosts: Sequence[Host]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh_port: int | None = None
    interface: str | None = None
    prefix: Sequence[str] = ()
    flags: Sequence[str] = ()
    as_root: bool = False


@dataclass(frozen=True)
class Command:
    """What to start: the words, and the variables beside those of the job."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join(
            [*(f"{name}={value}" for name, value in sorted(self.variables.items())), *self.words]
        )


def on_this_host(job: Job) -> Command:
    """By torchrun's machinery.

    Raises:
        UsageError: There are flags for an MPI launcher.
    """
    if job.flags:
        raise UsageError(
            "--extra-mpi-flags: ranks of this host are started by torchrun's machinery; add --launcher mpiexec"
        )
    return Command([*job.prefix, *LOCAL_RANKS, str(job.ranks), *RANK, *job.command])


def by_mpich(job: Job, mpiexec: str) -> Command:
    """By the mpiexec of MPICH (Hydra)."""
    words = [mpiexec, "-hosts", ",".join(f"{_bracketed(host.name)}:{host.slots}" for host in job.hosts)]
    if job.interface:
        words += ["-iface", job.interface]
    # Hydra has no flag for it.
    variables = {"HYDRA_LAUNCHER_EXTRA_ARGS": f"-p {job.ssh_port}"} if job.ssh_port else {}
    words += [*job.flags, "-n", str(job.ranks), *RANK, *job.command]
    return Command([*job.prefix, *words], variables)


def by_intel_mpi(job: Job, mpiexec: str) -> Command:
    """By the mpiexec of Intel MPI, which counts ranks of a host in parts of the command."""
    words = [mpiexec]
    if job.interface:
        words += ["-iface", job.interface]
    variables = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": f"-p {job.ssh_port}"} if job.ssh_port else {}
    words += job.flags
    for number, host in enumerate(job.hosts):
        words += [":"] if number else []
        words += ["-n", str(host.slots), "-host", host.name, *RANK, *job.command]
    return Command([*job.prefix, *words], variables)


def by_open_mpi(job: Job, mpiexec: str) -> Command:
    """By Open MPI's mpirun; fog has to be built against it (FOG_MPICXX) up to Open MPI 5."""
    words = [mpiexec, *(["--allow-run-as-root"] if job.as_root else []), "-np", str(job.ranks)]
    words += ["-H", ",".join(f"{_bracketed(host.name)}:{host.slots}" for host in job.hosts)]
    words += ["--bind-to", "none", "--map-by", "slot"]
    if job.ssh_port:
        words += ["-mca", "plm_rsh_args", f"-p {job.ssh_port}"]
    if job.interface:
        words += ["-mca", "btl_tcp_if_include", job.interface, "-mca", "oob_tcp_if_include", job.interface]
    for name in sorted(job.environment):
        if name.isidentifier() and not _NOT_PASSED_ON.fullmatch(name):
            words += ["-x", name]
    return Command([*job.prefix, *words, *job.flags, *RANK, *job.command])


def by_srun(job: Job, hosts_are_given: bool) -> Command:
    """By srun within an allocation of Slurm, which puts the hosts into an order of its own.

    Args:
        job: What to start.
        hosts_are_given: Whether the user has named the hosts; else they are those of the allocation.

    Raises:
        UsageError: The hosts have different numbers of ranks.
    """
    words = ["srun", f"--ntasks={job.ranks}", "--export=ALL", "--kill-on-bad-exit=1"]
    if hosts_are_given:
        counts = {host.slots for host in job.hosts}
        if len(counts) > 1:
            listed = ", ".join(f"{host.name}:{host.slots}" for host in job.hosts)
            raise UsageError(
                f"-H: srun starts as many ranks on each host; got {listed}. Or take --launcher mpiexec"
            )
        words += [
            f"--nodelist={','.join(host.name for host in job.hosts)}",
            f"--ntasks-per-node={counts.pop()}",
        ]
    return Command([*job.prefix, *words, *job.flags, *RANK, *job.command])


MPI_KINDS = {
    "HYDRA": by_mpich,
    "Intel(R) MPI": by_intel_mpi,
    "Open MPI": by_open_mpi,
    "OpenRTE": by_open_mpi,
    "PRRTE": by_open_mpi,
}
"""What `mpiexec --version` has in it, and who builds its command."""


def by_mpiexec(job: Job, mpiexec: str, version: str) -> Command:
    """By an mpiexec, of the MPI that its `--version` names.

    Raises:
        UsageError: It is of no MPI that fog knows.
    """
    for word, build in MPI_KINDS.items():
        if word in version:
            return build(job, mpiexec)
    first = version.strip().splitlines()[:1] or ["nothing"]
    raise UsageError(
        f"{mpiexec}: `--version` says {first[0]!r}; known are MPICH, Intel MPI and Open MPI. "
        "Name another with --mpiexec"
    )


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name

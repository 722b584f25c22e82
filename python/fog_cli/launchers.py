"""Builds the command that starts the ranks, for each launcher. Its functions are pure: they start no process."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fog_cli import UsageError
from fog_cli.hosts import Host

# The program that runs a rank's command and prefixes each line of its output with the rank.
RANK = [sys.executable, "-m", "fog_cli.programs.rank"]
AGENT = [sys.executable, "-m", "fog_cli.programs.agent"]
TOP = [sys.executable, "-m", "fog_cli", "top"]
LOCAL_RANKS = [sys.executable, "-m", "fog_cli.programs.local_ranks"]

# Open MPI passes on only the variables that -x names. These are left out because they describe the host or the process
# that mpirun runs on.
_NOT_PASSED_ON = re.compile(r"(BASH_FUNC_.*|OMPI_.*|PMIX_.*|PRTE_.*|HOSTNAME|PWD|OLDPWD|SHLVL|_)")


@dataclass(frozen=True)
class Job:
    """The checked arguments of `fog run`.

    Attributes:
        ranks: The number of ranks.
        hosts: The hosts with the ranks of each, in the order of ranks, except under srun; one is this machine.
        command: The command of each rank.
        environment: All environment variables of the ranks.
        ssh_port: The port of ssh; None for its default.
        interface: The network interface; None to let the programs choose.
        prefix: Words to put before the launcher's command.
        flags: Additional arguments for an MPI launcher or srun.
        as_root: Whether the user is root, for which Open MPI needs a flag.
        log_folder: The folder of files with the output of each rank; None for no files.
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
    log_folder: str | None = None

    @property
    def rank(self) -> list[str]:
        """The program of a rank, with the rank's command."""
        return [*RANK, *(["--log-dir", self.log_folder] if self.log_folder else []), *self.command]


@dataclass(frozen=True)
class Command:
    """A command to start: its words, and the environment variables that it needs in addition to those of the job."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join(
            [*(f"{name}={value}" for name, value in sorted(self.variables.items())), *self.words]
        )


def on_this_host(job: Job) -> Command:
    """Returns the command that starts the ranks on this host, as torchrun does.

    Raises:
        UsageError: There are flags for an MPI launcher.
    """
    if job.flags:
        raise UsageError(
            "--extra-mpi-flags: ranks of this host are started by torchrun's machinery; add --launcher mpiexec"
        )
    return Command([*job.prefix, *LOCAL_RANKS, str(job.ranks), *job.rank])


def by_mpich(job: Job, mpiexec: str) -> Command:
    """Returns the command for the mpiexec of MPICH (Hydra)."""
    words = [mpiexec, "-hosts", ",".join(f"{_bracketed(host.name)}:{host.slots}" for host in job.hosts)]
    if job.interface:
        words += ["-iface", job.interface]
    # Hydra has no flag for the port.
    variables = {"HYDRA_LAUNCHER_EXTRA_ARGS": f"-p {job.ssh_port}"} if job.ssh_port else {}
    words += [*job.flags, "-n", str(job.ranks), *job.rank]
    return Command([*job.prefix, *words], variables)


def by_intel_mpi(job: Job, mpiexec: str) -> Command:
    """Returns the command for the mpiexec of Intel MPI, which takes a section of the command for each host."""
    words = [mpiexec]
    if job.interface:
        words += ["-iface", job.interface]
    variables = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": f"-p {job.ssh_port}"} if job.ssh_port else {}
    words += job.flags
    for number, host in enumerate(job.hosts):
        words += [":"] if number else []
        words += ["-n", str(host.slots), "-host", host.name, *job.rank]
    return Command([*job.prefix, *words], variables)


def by_open_mpi(job: Job, mpiexec: str) -> Command:
    """Returns the command for Open MPI's mpirun. Up to Open MPI 5, fog must be built against it (FOG_MPICXX)."""
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
    return Command([*job.prefix, *words, *job.flags, *job.rank])


def by_srun(job: Job, hosts_are_given: bool) -> Command:
    """Returns the command for srun within an allocation of Slurm, which chooses the order of the hosts.

    Args:
        job: The job to start.
        hosts_are_given: Whether the user named the hosts; otherwise srun takes those of the allocation.

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
    return Command([*job.prefix, *words, *job.flags, *job.rank])


def agent_by_ssh(job: Job, host: Host) -> Command:
    """Returns the command for the agent of another host, see `fog_cli.programs.agent`, over ssh.

    Everything else comes over its standard input, so no variable and no argument shows in lists of processes.
    """
    return Command(by_ssh(host.name, [*job.prefix, *AGENT], job.ssh_port, job.environment))


def by_ssh(
    host: str, words: Sequence[str], ssh_port: int | None, environment: Mapping[str, str]
) -> list[str]:
    """Returns the command that runs another one on another host over ssh, with the modules that this process finds.

    Args:
        host: The name of the host.
        words: The command to run there.
        ssh_port: The port of ssh; None for its default.
        environment: The variables of this process.
    """
    options = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=30", "ServerAliveCountMax=10")
    ssh = ["ssh", *(word for option in options for word in ("-o", option))]
    if ssh_port:
        ssh += ["-p", str(ssh_port)]
    path = environment.get("PYTHONPATH")
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    return [*ssh, host, shlex.join(["exec", *variables, *words])]


def agent_by_srun(job: Job, host: Host) -> Command:
    """Returns the command for the agent of a host of the allocation: a step of its own, so that no other ends with it.

    The allocation needs --no-kill to survive the loss of a node. The step must not have it: it is to end with its node,
    so that its end is seen.
    """
    words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--cpu-bind=none"]
    words += ["--no-kill=off", "--kill-on-bad-exit=0", "--unbuffered", "--export=ALL"]
    return Command([*words, *job.flags, *job.prefix, *AGENT])


def agent_on_this_host(job: Job) -> Command:
    """Returns the command for the agent of this host."""
    return Command([*job.prefix, *AGENT])


MPI_KINDS = {
    "HYDRA": by_mpich,
    "Intel(R) MPI": by_intel_mpi,
    "Open MPI": by_open_mpi,
    "OpenRTE": by_open_mpi,
    "PRRTE": by_open_mpi,
}
"""A text that the output of `mpiexec --version` contains, and the function that builds the command."""


def by_mpiexec(job: Job, mpiexec: str, version: str) -> Command:
    """Returns the command for the MPI that the output of `mpiexec --version` names.

    Raises:
        UsageError: fog does not know this MPI.
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

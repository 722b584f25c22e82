"""Runs one script, tests/all_operations.py, under every launcher and MPI, on one host and on several.

Tests are skipped if their MPI is not installed. ``make test-mpi`` installs all of them, and sets FOG_TEST_MPI=all for 4
ranks and large tensors. Otherwise there are 2 ranks and small tensors, so that ``make test`` stays quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from harness import WorldPool
from hosts import ACROSS, address, emulated_hosts, namespace_names, sent_bytes
from mpi_installations import Installation, Missing, intel, mpich, open_mpi
from scripts import ROOT, Job, launcher_command, run_script, started

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

ALL = os.environ.get("FOG_TEST_MPI") == "all"
RANKS = 4 if ALL else 2
TIMEOUT = 600.0  # enough for a busy machine
OPERATIONS = [ROOT / "tests" / "all_operations.py", *([] if ALL else ["--small"])]
# Hides torch's warnings about names that later versions will drop.
QUIET = {"PYTHONWARNINGS": "ignore"}
LINKS_OFF = {"_FOG_LOCAL_LINKS": "0"}
PORT = 29511

only_in_full = pytest.mark.skipif(not ALL, reason="one of the slower ones: make test-mpi runs it")
installations = pytest.mark.parametrize("find", [mpich, intel, open_mpi])


def found(find: Callable[[], Installation]) -> Installation:
    """Returns an installation; skips the test if it is missing."""
    try:
        return find()
    except Missing as missing:
        pytest.skip(str(missing))


def check_operations(jobs: Sequence[Job], library: str) -> None:
    """Waits for jobs of tests/all_operations.py that form one world, and checks the output of its ranks."""
    with started(jobs):
        statuses = [job.wait(TIMEOUT) for job in jobs]
    output = "\n".join(job.output for job in jobs)
    assert statuses == [0] * len(jobs), output
    check_lines(output, library)


def check_lines(output: str, library: str) -> None:
    lines = sorted(line for line in output.splitlines() if line.startswith("rank "))
    assert len(lines) == RANKS, output
    for rank, line in enumerate(lines):
        assert line.startswith(f"rank {rank} of {RANKS}: "), output
        assert f"steps right on {library}" in line, output


# One host


@pytest.mark.parametrize(
    "links", [{}, pytest.param(LINKS_OFF, marks=only_in_full)], ids=["with links", "without links"]
)
@installations
def test_mpiexec(find: Callable[[], Installation], links: Mapping[str, str], tmp_path: Path) -> None:
    """Without links, all messages go through MPI."""
    installation = found(find)
    environment = QUIET | dict(links) | dict(installation.environment)
    job = Job(OPERATIONS, RANKS, tmp_path / "log.txt", installation.launcher(RANKS), environment)
    check_operations([job], installation.name)


# Starts MPI as mpi4py does, and continues to use it in another thread.
BESIDE_ANOTHER = """
import atexit, ctypes, sys, threading
from fog_pg._extension import find_mpi_library

library = ctypes.CDLL(find_mpi_library())
multiple, world, provided = 4096, ctypes.c_void_p(0x101), ctypes.c_int()  # of the standard ABI
assert library.MPI_Init_thread(None, None, multiple, ctypes.byref(provided)) == 0 and provided.value == multiple
atexit.register(library.MPI_Finalize)

import fogdist
import torch
import torch.distributed as dist

fogdist.init()
thread = threading.Thread(target=lambda: [library.MPI_Barrier(world) for _ in range(200)])
thread.start()
total = 0.0
for _ in range(200):
    x = torch.ones(3)
    dist.all_reduce(x)
    total += x.sum().item()
thread.join()
sys.stdout.write(f"rank {fogdist.rank()}: {total}\\n")
fogdist.shutdown()
"""


def test_mpi_that_another_user_has_started(tmp_path: Path) -> None:
    """With MPI_THREAD_MULTIPLE both may use MPI; other levels are errors, see test_mpi_library."""
    script = tmp_path / "beside_another.py"
    script.write_text(BESIDE_ANOTHER)
    job = Job([script], 2, tmp_path / "log.txt", found(mpich).launcher(2), QUIET | LINKS_OFF)
    with started([job]):
        assert job.wait(TIMEOUT) == 0, job.output
    assert sorted(line for line in job.output.splitlines() if line.startswith("rank ")) == [
        "rank 0: 1200.0",
        "rank 1: 1200.0",
    ], job.output


@only_in_full
@pytest.mark.parametrize("links", [{}, LINKS_OFF], ids=["with links", "without links"])
@pytest.mark.parametrize("find", [mpich, intel])
def test_torchrun(find: Callable[[], Installation], links: Mapping[str, str], tmp_path: Path) -> None:
    """fog's own PMI server starts MPI."""
    installation = found(find)
    environment = QUIET | dict(links) | dict(installation.environment)
    job = Job(OPERATIONS, RANKS, tmp_path / "log.txt", "torchrun", environment)
    check_operations([job], installation.name)


def test_every_operation_without_local_links(tmp_path: Path) -> None:
    pool = WorldPool(initialize=False, environment=QUIET | LINKS_OFF)
    try:
        output = run_script(OPERATIONS, RANKS, tmp_path / "log.txt", pool, timeout=120)
    finally:
        pool.close()
    check_lines(output, "MPICH")


# Several hosts


def torchrun_on(hosts: Sequence[str], log: Path, environment: Mapping[str, str]) -> list[Job]:
    """Starts one torchrun on each host, with the same number of ranks on each."""
    local = RANKS // len(hosts)
    placement = [str(rank // local) for rank in range(RANKS)]
    jobs = []
    for number, name in enumerate(hosts):
        launcher = [*("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run")]
        launcher += [f"--nnodes={len(hosts)}", f"--node_rank={number}", f"--nproc_per_node={local}"]
        launcher += [f"--master_addr={address(0)}", f"--master_port={PORT}"]
        script = [*OPERATIONS, "--hosts", *placement]
        jobs.append(Job(script, local, log / f"host{number}.txt", launcher, environment))
    return jobs


def check_two_hosts(log: Path, environment: Mapping[str, str], library: str) -> None:
    # The link is much slower than memory, so the processes wait for it.
    with emulated_hosts(2, rate="1gbit" if ALL else None) as names:
        assert namespace_names()
        check_operations(torchrun_on(names, log, QUIET | dict(environment)), library)
        assert all(sent_bytes(name) > (64 if ALL else 4) << 20 for name in names), "not sent over the link"
    assert not namespace_names()


@pytest.mark.parametrize("netmod", ["UCX", pytest.param("OFI", marks=only_in_full)])
def test_torchrun_on_two_hosts(netmod: str, tmp_path: Path) -> None:
    check_two_hosts(tmp_path, ACROSS[netmod], "MPICH")


@only_in_full
def test_torchrun_on_two_hosts_with_intel_mpi(tmp_path: Path) -> None:
    installation = found(intel)
    environment = {"I_MPI_OFI_PROVIDER": "tcp"} | dict(installation.environment)
    check_two_hosts(tmp_path, environment, installation.name)


# Ranks that are killed

ONE_IS_KILLED = """
import os
import signal

import fogdist
import torch
import torch.distributed as dist

fogdist.init()
x = torch.ones(100_000)
for step in range(10**9):
    if step == 100 and fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x, dist.ReduceOp.MAX)
"""


@only_in_full
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
@installations
def test_killed_rank(find: Callable[[], Installation], launcher: str, tmp_path: Path) -> None:
    """The job ends with an error, and nothing of it is left (`started` and a fixture check this)."""
    installation = found(find)
    if launcher == "torchrun" and find is open_mpi:
        pytest.skip("Open MPI 4.1 starts under its own launcher only: it knows no PMI-1")
    script = tmp_path / "one_is_killed.py"
    script.write_text(ONE_IS_KILLED)
    words = installation.launcher(4) if launcher == "mpiexec" else launcher_command("torchrun", 4)
    job = Job([script], 4, tmp_path / "log.txt", words, installation.environment)
    with started([job]):
        status = job.wait(60)
    assert status != 0 and "Segmentation" not in job.output, job.output

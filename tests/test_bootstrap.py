"""Tests of the start: loading the extension and MPI, rendezvous over any Store, groups on one host and on several."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import harness
import pytest
import torch
import torch.distributed as dist
from harness import ALL, World, WorldPool, on_ranks
from hosts import address, count_connections, emulated_hosts, ip, move_to_host, namespace_names
from reference import Checks
from scripts import Job, launcher_command
from window_interfaces import WAYS

pytestmark = pytest.mark.usefixtures("no_shared_memory_left")

TIMEOUT = timedelta(seconds=20)
# The value of FOG_HOST_TIMEOUT.
HOST_TIMEOUT = 37


def my_rank() -> int:
    """Returns this process's rank in its world, before there is a group."""
    return int(os.environ["RANK"])


def my_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def launcher_store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def join(store: dist.Store, timeout: timedelta = TIMEOUT) -> None:
    import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    dist.init_process_group("fog", store=store, rank=my_rank(), world_size=my_size(), timeout=timeout)


def check_sum(group: dist.ProcessGroup | None = None) -> None:
    """Checks an all_reduce of the members' global ranks, in one message and in several."""
    members = dist.get_process_group_ranks(group) if group else range(dist.get_world_size())
    for numel in (1, 100_000):
        tensor = torch.full((numel,), float(dist.get_rank()))
        dist.all_reduce(tensor, group=group)
        torch.testing.assert_close(tensor, torch.full((numel,), float(sum(members))))


# Stores


def start_over(kind: str, path: str) -> None:
    if kind.endswith("TCPStore"):
        store: dist.Store = launcher_store()
    else:
        store = dist.FileStore(path, my_size())
    if kind.startswith("PrefixStore"):
        store = dist.PrefixStore("job", store)
    join(store)
    check_sum()
    dist.barrier()


def test_any_store(new_world: Callable[..., World], tmp_path: Path) -> None:
    world = new_world(2, initialize=False)
    kinds = ["TCPStore", "FileStore", "PrefixStore over TCPStore", "PrefixStore over FileStore"]
    for number, kind in enumerate(kinds):
        world.run(start_over, kind, str(tmp_path / f"store{number}"))
        world.run(dist.destroy_process_group)


def mapped(name: str) -> list[int]:
    """Returns the size of each mapping of this process whose file has `name` in its name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            found.append(last - first)
    return found


def all_sizes_and_a_window() -> bool:
    """Returns whether MPI's library is loaded after operations that need no MPI."""
    check_sum()
    peer = my_size() - 1 - my_rank()
    tensor = torch.zeros(1 << 20)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(1 << 20), peer), dist.P2POp(dist.irecv, tensor, peer)]
    ):
        work.wait()
    assert tensor.eq(1.0).all()
    return mapped("libmpi") != []


@pytest.mark.parametrize("way", ["memory", "tcp", "rma"])
def test_mpi_is_loaded_for_rma_only(new_world: Callable[..., World], way: str) -> None:
    world = new_world(2, environment=WAYS[way])
    assert world.run(all_sizes_and_a_window) == [way == "rma"] * 2


def mapped_inboxes(ranks_per_host: int) -> list[int]:
    from fog_pg import _C

    _C.emulate(host_id=f"host {my_rank() // ranks_per_host}")
    join(launcher_store())
    check_sum()
    return mapped("memfd:fog_inbox")


def test_inboxes_are_those_of_the_host(new_world: Callable[..., World]) -> None:
    """Four ranks on two hosts map two inboxes; each has a ring for every rank, as any may come back on this host."""
    whole, halves = (new_world(4, initialize=False).run(mapped_inboxes, ranks) for ranks in (4, 2))
    for large, small in zip(whole, halves, strict=True):
        assert len(large) == 4 and len(small) == 2
        assert len({*large, *small}) == 1


def start_alone() -> None:
    join(dist.HashStore())
    check_sum()
    dist.barrier()
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, torch.ones(2))
    torch.testing.assert_close(gathered[0], torch.ones(2))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.hosts == [0] and backend.local_ranks == [0]  # type: ignore[attr-defined]


def test_hash_store_and_a_single_rank(new_world: Callable[..., World]) -> None:
    new_world(1, initialize=False).run(start_alone)


def start_again_and_again(times: int) -> None:
    store = launcher_store()
    for _ in range(times):
        join(store)
        check_sum()
        dist.destroy_process_group()


def test_init_and_destroy_on_one_store(new_world: Callable[..., World]) -> None:
    new_world(3, initialize=False).run(start_again_and_again, 5)


def start_without(late: int) -> str:
    """The late rank joins after the others have given up, and gets no answer from rank 0."""
    launcher = launcher_store()
    store = dist.PrefixStore("too late", launcher)
    if my_rank() == late:
        launcher.wait([f"{rank} gave up" for rank in range(my_size()) if rank != late])
    with pytest.raises(dist.DistBackendError) as failure:
        join(store, timedelta(seconds=0.5 if my_rank() == late else 2))
    launcher.set(f"{my_rank()} gave up", "")
    return str(failure.value)


def new_group_without(missing: int) -> str:
    if my_rank() == missing:
        return ""
    with pytest.raises(dist.DistBackendError) as failure:
        dist.new_group(timeout=timedelta(seconds=1))
    return str(failure.value)


def test_missing_rank_is_named_and_all_can_start_later(new_world: Callable[..., World]) -> None:
    world = new_world(3, initialize=False)
    for rank, message in enumerate(world.run(start_without, 2, timeout=15)):
        missing, waited = (0, 500) if rank == 2 else (2, 2000)
        assert f"not there: rank(s) {missing}" in message and f"waited for {waited} ms" in message, message
    world.run(start_over, "TCPStore", "", timeout=25)
    for rank, message in enumerate(world.run(new_group_without, 1, timeout=15)):
        assert rank == 1 or "not there: rank(s) 1" in message, message
    world.run(check_sum)


# Groups


def subsets() -> None:
    members = [[0, 1], [1, 2], [2, 3], [0, 2, 3], [3], [3, 1], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    for ranks, group in reversed(list(zip(members, groups, strict=True))):
        if dist.get_rank() not in ranks:
            continue
        check_sum(group)
        backend = group._get_backend(torch.device("cpu"))
        assert backend.rank() == sorted(ranks).index(dist.get_rank())
        assert backend.local_ranks == list(range(len(ranks)))
        assert backend.hosts == [0] * len(ranks)
    # Half of the groups are destroyed; the others still work.
    for ranks, group in list(zip(members, groups, strict=True))[::2]:
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)
    if dist.get_rank() in members[3]:
        check_sum(groups[3])
    check_sum()


def test_subsets_and_overlapping_groups(new_world: Callable[..., World]) -> None:
    new_world(4).run(subsets)


def beside_gloo() -> None:
    import fog_pg  # noqa: F401

    group = dist.new_group(backend="fog")
    check_sum(group)
    check_sum()
    assert dist.get_backend(group) == "fog" and dist.get_backend() == "gloo"
    dist.barrier(group)


def test_group_of_all_ranks_beside_gloo(new_world: Callable[..., World]) -> None:
    new_world(3, backend="gloo").run(beside_gloo)


def groups_of_two_worlds() -> str:
    """The ranks of a process's first fog group are the only ones that it can reach later."""
    import fog_pg  # noqa: F401

    halves = [dist.new_group(ranks, backend="fog") for ranks in ([0, 1], [2, 3])]
    mine = halves[dist.get_rank() // 2]
    check_sum(mine)
    with pytest.raises(dist.DistBackendError) as failure:
        dist.new_group(backend="fog", timeout=timedelta(seconds=5))
    check_sum(mine)
    return str(failure.value)


def test_group_that_spans_two_worlds(new_world: Callable[..., World]) -> None:
    for message in new_world(4, backend="gloo").run(groups_of_two_worlds, timeout=20):
        assert "belongs to another world" in message and "Make a fog group of all ranks first" in message


def test_two_jobs_at_once(new_world: Callable[..., World]) -> None:
    worlds = [new_world(2, initialize=False) for _ in range(2)]
    with ThreadPoolExecutor(len(worlds)) as pool:
        for started in [pool.submit(world.run, start_over, "TCPStore", "") for world in worlds]:
            started.result()
        for summed in [pool.submit(world.run, check_sum) for world in worlds]:
            summed.result()


# Arguments


def bad_environment() -> None:
    import fog_pg  # noqa: F401

    allowed = "allowed are whole seconds from 4 to 32767"
    wrong = [("FOG_HOST_TIMEOUT", text, allowed) for text in ("3", "-1", "11.5", "40000", "never")]
    wrong.append(("FOG_INTERFACE", "eth99", "allowed is the name of a network interface that is up"))
    for variable, value, message in wrong:
        os.environ[variable] = value
        with pytest.raises(ValueError, match=f"{variable}: got '{value}'; {message}"):
            dist.init_process_group("fog", store=dist.HashStore(), rank=0, world_size=1)
        del os.environ[variable]


def bad_options() -> None:
    bad_environment()
    import fog_pg  # noqa: F401

    for options in (object(), dist.ProcessGroupGloo._Options(), {"confirm": False}):
        with pytest.raises(TypeError, match=r"pg_options: got \w+; allowed .*ProcessGroupFog.Options"):
            dist.init_process_group("fog", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
        assert not dist.is_initialized()


def good_options() -> str:
    """The timeout is that of init_process_group, even if options are given."""
    import fog_pg  # noqa: F401
    from fog_pg._extension import load

    options = load().ProcessGroupFog.Options()
    options.confirm = False
    dist.init_process_group("fog", pg_options=options, timeout=timedelta(seconds=1))
    check_sum()
    if dist.get_rank() == 1:
        time.sleep(1.5)  # longer than the other rank waits
        return ""
    with pytest.raises(dist.DistBackendError) as failure:
        dist.recv(torch.zeros(1), 1)
    return str(failure.value)


def test_bad_options(new_world: Callable[..., World]) -> None:
    new_world(1, initialize=False).run(bad_options)


def test_options_of_a_group(new_world: Callable[..., World]) -> None:
    assert "its timeout of 1000 ms is over" in new_world(2, initialize=False).run(good_options, timeout=5)[0]


def other_devices() -> None:
    # dist.all_reduce of such a tensor is handled by torch itself: it does nothing, on every backend.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    for call in (backend.allreduce, backend.broadcast):
        with pytest.raises(ValueError, match="got one on meta; allowed are tensors on cpu, cuda"):
            call([torch.ones(2, device="meta")])
    with pytest.raises(ValueError, match="got one on meta; allowed are tensors on cpu, cuda"):
        backend.allgather_concat(torch.ones(2, device="meta"))  # type: ignore[attr-defined]
    check_sum()


def test_tensors_on_other_devices(worlds: WorldPool) -> None:
    worlds(2).run(other_devices)


# Loading


def import_only() -> None:
    # Forget fog_pg, because "import torch" may have imported it already.
    for name in [name for name in sys.modules if name.partition(".")[0] == "fog_pg"]:
        del sys.modules[name]
    dist.Backend._plugins.pop("FOG", None)
    import fog_pg

    fog_pg.autoload()  # "import torch" calls this where the package is installed
    fog_pg.register()
    assert dist.Backend.FOG == "fog" and dist.is_backend_available("fog")
    assert [name for name in sys.modules if name.startswith("fog_pg.")] == []
    maps = Path("/proc/self/maps").read_text()
    assert "libtorch_cpu" in maps
    assert "libmpi" not in maps and "fog_pg/_C" not in maps
    join(dist.HashStore())  # fog still works after these checks
    check_sum()


def test_import_loads_no_library(new_world: Callable[..., World]) -> None:
    new_world(1, initialize=False).run(import_only)


def load_error(patch: Callable[[pytest.MonkeyPatch], None]) -> str:
    """Returns the ImportError of a first group; afterwards the process still has no group."""
    import fog_pg  # noqa: F401

    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        with pytest.raises(ImportError) as failure:
            join(dist.HashStore())
    assert not dist.is_initialized()
    return str(failure.value)


def name_library(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("FOG_MPI_LIBRARY", name)


def name_library_without_abi(patch: pytest.MonkeyPatch) -> None:
    from fog_pg import _extension

    package = _extension._mpich_package_library()
    if package is None:
        pytest.skip("needs the package mpich")
    patch.setenv("FOG_MPI_LIBRARY", str(package.with_name("libmpi.so.12")))


def find_no_library(patch: pytest.MonkeyPatch) -> None:
    from fog_pg import _extension

    patch.delenv("FOG_MPI_LIBRARY", raising=False)
    patch.setattr(_extension, "_mpich_package_library", lambda: None)
    patch.setattr(_extension, "_LIBRARY_NAMES", ())
    patch.setattr(_extension, "find_library", lambda name: None)


def build_for_another_torch(patch: pytest.MonkeyPatch) -> None:
    from fog_pg import _build_info

    patch.setattr(_build_info, "TORCH_VERSIONS", ("2.7.1+cu126",))


def lose_the_extension(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "fog_pg._C", None)  # makes an import fail
    import fog_pg

    patch.delattr(fog_pg, "_C", raising=False)


def native_build() -> bool:
    from fog_pg import _build_info

    return _build_info.NATIVE_MPI


@pytest.fixture(scope="module")
def bare_worlds() -> Iterator[list[World]]:
    made: list[World] = []
    yield made
    harness.close_all(made)


@pytest.fixture
def bare_world(bare_worlds: list[World]) -> World:
    """One process that has not loaded the extension, for tests that must not load it."""
    if not bare_worlds or bare_worlds[-1].broken:
        bare_worlds.append(World(1, initialize=False))
    return bare_worlds[-1]


@pytest.mark.parametrize(
    ("patch", "shown"),
    [
        (build_for_another_torch, ["2.7.1+cu126", torch.__version__, "pip install --no-build-isolation"]),
        (lose_the_extension, ["cannot be loaded", "pip install --no-build-isolation"]),
        (
            functools.partial(name_library, "/nowhere/libmpi_abi.so"),
            ["FOG_MPI_LIBRARY", "/nowhere/libmpi_abi.so", "not a file"],
        ),
        (
            functools.partial(name_library, "libnowhere_abi.so.1"),
            ["libnowhere_abi.so.1", "pip install 'mpich>=5'"],
        ),
        (
            functools.partial(name_library, "libm.so.6"),
            ["libm.so.6", "MPI standard ABI", "pip install 'mpich>=5'"],
        ),
        (name_library_without_abi, ["libmpi.so.12", "MPI standard ABI"]),
        (find_no_library, ["pip install 'mpich>=5'", "FOG_MPI_LIBRARY", "FOG_MPICXX"]),
    ],
)
def test_import_errors(
    bare_world: World, patch: Callable[[pytest.MonkeyPatch], None], shown: list[str]
) -> None:
    if native_build() and patch not in (build_for_another_torch, lose_the_extension):
        pytest.skip("a native build looks for no library")
    message = bare_world.run(load_error, patch)[0]
    assert [text for text in shown if text not in message] == [], message


# Launchers

CONSENSUS = """
import sys

import torch
import fogdist

fogdist.init()
x = torch.tensor([float(fogdist.rank())], dtype=torch.float64)
for _ in range(100):
    x = fogdist.neighbor_allreduce(x)
place = f"{fogdist.rank()} of {fogdist.size()} ({fogdist.local_rank()} of {fogdist.local_size()})"
sys.stdout.write(f"rank {place}: {x.item()}\\n")  # one write, so that the lines of ranks do not mix
fogdist.shutdown()
"""


def test_torchrun_and_mpiexec_agree(tmp_path: Path) -> None:
    if not Path(launcher_command("mpiexec", 1)[0]).exists():
        pytest.skip("the package mpich brings no mpiexec to this interpreter")
    script = tmp_path / "consensus.py"
    script.write_text(CONSENSUS)
    ranks = 4 if ALL else 2
    jobs = [Job([script], ranks, tmp_path / f"{name}.log", name) for name in ("torchrun", "mpiexec")]
    try:
        assert [job.wait(45) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    finally:
        for job in jobs:
            job.stop()
    for job in jobs:
        lines = sorted(line for line in job.output.splitlines() if line.startswith("rank "))
        expected = [f"rank {rank} of {ranks} ({rank} of {ranks}): {(ranks - 1) / 2}" for rank in range(ranks)]
        assert lines == expected, job.output


# Several hosts


def join_on_host(names: list[str], placement: list[int], clones: bool) -> None:
    """Moves to the rank's host, and joins the group there over TCP."""
    from fog_pg import _C

    if clones:  # as for clones of a running virtual machine: no name distinguishes the two
        _C.emulate(host_id="boot/net:[1]/pid:[1]/shm:1:1")
    move_to_host(names[placement[my_rank()]])
    store = dist.TCPStore(address(placement[0]), 29500, my_size(), my_rank() == 0, timeout=TIMEOUT)
    join(store)
    (line,) = (line for line in _C.own_entry().splitlines() if " mark=" in line)
    # The host has two interfaces. Other ranks connect to the job's one, when they have something to send.
    port, *addresses, _ = line.split()
    assert addresses == [address(placement[my_rank()])]
    assert count_connections() == 0
    # Connections of other programs are closed.
    with socket.create_connection((addresses[0], int(port)), timeout=10) as unknown:
        unknown.sendall(bytes(48))  # the length of a hello
        assert unknown.recv(1) == b""


def check_hosts(placement: list[int]) -> None:
    from fog_pg import _C

    rank, size = dist.get_rank(), dist.get_world_size()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert backend.hosts == placement  # type: ignore[attr-defined]
    local = [other for other in range(size) if placement[other] == placement[rank]]
    assert backend.local_ranks == local  # type: ignore[attr-defined]
    check_sum()
    peers = [((rank + step) % size, 0.25) for step in (1, size - 1)]
    plan = _C.NeighborPlan(rank, size, 0.5, peers, [(peer, 1.0) for peer, _ in peers])
    for numel in (1, 100_000):
        tensor = torch.full((numel,), float(rank))
        work = backend.neighbor_allreduce(tensor, plan)  # type: ignore[attr-defined]
        work.wait()
        expected = 0.5 * rank + sum(0.25 * peer for peer, _ in peers)
        torch.testing.assert_close(work.result()[0], torch.full((numel,), expected))
    dist.barrier()
    assert count_connections() == placement.count(1 - placement[rank])


@pytest.mark.parametrize(
    "placement", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["one after the other", "clones, in turn"]
)
def test_two_hosts(placement: list[int]) -> None:
    clones = placement[1] == 1
    with emulated_hosts(2) as names:
        assert namespace_names()
        for number, name in enumerate(names):
            ip("-n", name, "link", "add", "other", "type", "veth", "peer", "name", "end")
            ip("-n", name, "address", "add", f"10.213.78.{number + 1}/24", "dev", "other")
            for interface in ("other", "end"):
                ip("-n", name, "link", "set", interface, "up")
        world = World(4, initialize=False, environment={"FOG_HOST_TIMEOUT": str(HOST_TIMEOUT)})
        try:
            world.run(join_on_host, names, placement, clones, timeout=30)
            world.run(check_hosts, placement, timeout=30)
        finally:
            if world.broken:
                world.abandon()
            else:
                world.close()
    assert not namespace_names()


# Forked processes


def in_forked_child(action: Callable[[], object]) -> tuple[str, int]:
    """Returns the error of `action` in a forked child, and the exit status of the child, which ends as Python does."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends the child if it hangs
        text = "nothing"
        try:
            action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        ctypes.pythonapi.Py_Exit(7)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@on_ranks(2)
def test_forked_child() -> None:
    """It uses the group in vain, ends as any process does, and the parent is not affected."""
    rank, received = dist.get_rank(), torch.zeros(1000)
    fogdist.init()
    check_sum()
    work: Any = dist.irecv(received, 1 - rank)
    uses: dict[str, Callable[[], object]] = {
        "wait for the parent's operation": lambda: work.wait(timedelta(seconds=2)),
        "collective": lambda: dist.all_reduce(torch.ones(2)),
        "barrier": dist.barrier,
        "exchange": lambda: fogdist.neighbor_allreduce(torch.ones(2)),
        "window": lambda: fogdist.Window(torch.ones(2)),
        "new group": lambda: dist.new_group([rank]),
        "nothing": lambda: None,
        "destroy": dist.destroy_process_group,
    }
    with Checks() as checks:
        for kind, use in uses.items():
            message, status = in_forked_child(use)
            checks.equal(kind, status, 7)
            if kind in ("nothing", "destroy"):
                checks.equal(kind, message, "nothing")
            else:
                checks.true(f"{kind}: {message}", message.startswith("RuntimeError") and "forked" in message)
            check_sum()
        dist.send(torch.ones(1000), 1 - rank)
        work.wait()
        checks.equal("of the parent", received, torch.ones(1000))


# What a forked child may ask, because no lock is needed: what does not change, and what is not about the job.
ANSWERED = """
group.hosts group.id group.local_ranks group.options group.world_ranks
window.in_neighbors window.is_gone window.name window.out_neighbors window.tensor window.transport window.transport_to
.announced .emulate .init_logging .job_secret .load_mpi .mpi_version .note_epoch .note_job .note_step
.observe .protocol .read_flight_record .shutdown .stop_timeline .suspend_detection .timeline_is_on
.timeline_path
"""


def looks() -> dict[str, Callable[[], object]]:
    """Returns a call of what fog's extension has for users without an argument, or for one rank, by its name."""
    from fog_pg import _C

    peer = 1 - dist.get_rank()
    group: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    window = group.create_window(torch.zeros(2), "w", [peer], [peer])

    def call(function: Callable[..., object]) -> None:
        try:
            function()
        except TypeError:
            function(peer)

    calls: dict[str, Callable[[], object]] = {}
    for what, owner in {"group": group, "window": window, "hold": window.hold([peer]), "": _C}.items():
        for name, value in vars(_C if owner is _C else type(owner)).items():
            if isinstance(value, property):
                calls[f"{what}.{name}"] = functools.partial(getattr, owner, name)
            elif callable(value) and not isinstance(value, type) and not name.startswith("_"):
                calls[f"{what}.{name}"] = functools.partial(call, getattr(owner, name))
    return calls


def ask_in_forked_child() -> dict[str, str]:
    """Returns what a child answers that was forked while a thread held the engine's lock."""
    from fog_pg import _C

    calls = looks()
    reader, writer = os.pipe()
    children = []

    def fork() -> None:
        children.append(os.fork())
        if children[0] == 0:
            for name, call in calls.items():
                signal.alarm(10)  # ends the child if it hangs
                os.write(writer, f"\n{name}: ".encode())
                try:
                    call()
                except BaseException as error:
                    os.write(writer, f"{type(error).__name__}: {error}".splitlines()[0].encode())
            os.write(writer, b"\nend: ")
            os._exit(0)

    _C.with_engine_locked(fork)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        lines = pipe.read().splitlines()[1:]
    os.waitpid(children[0], 0)
    check_sum()  # the parent is not affected
    return dict(line.split(": ", 1) for line in lines)


def test_what_a_forked_child_may_ask(new_world: Callable[..., World]) -> None:
    """Regression: calls that only look waited for a lock of a thread that the child does not have."""
    for answers in new_world(2).run(ask_in_forked_child):
        assert list(answers)[-1] == "end", f"hangs: {list(answers)[-1]}"
        operations = {
            name for name, text in answers.items() if text.startswith("TypeError")
        }  # with more arguments
        refused = {name for name, text in answers.items() if "RuntimeError" in text and "forked" in text}
        assert {"group.lost_ranks", "group.lost_after", "window.version"} <= refused
        wrong = (set(answers) - refused - operations) ^ {*ANSWERED.split(), "end"}
        assert not wrong, "\n".join(f"{name}: {answers.get(name)}" for name in sorted(wrong))

"""Tests of ranks in a notebook: start, stop, interrupt and end, and the notebooks of examples/notebooks.

Tests that need ipyparallel are skipped if it is not installed; `make test-notebooks` installs it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog
import fogdist.interactive
import pytest
from fogdist.interactive import Cluster
from scripts import ROOT

NEEDED = ["ipyparallel", "nbclient", "ipykernel"]
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
with_notebooks = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} not installed: make test-notebooks"
)

SIZE = 3
# The timeout of one cell, in seconds. Cells take a fraction of it; the rest is for a busy machine.
TIMEOUT = 60.0
# The seconds in which ranks learn of a lost rank, and ended processes disappear.
SOON = 30.0


class Failed(Exception):
    """Raised with the errors of a cell on some ranks, in one text."""


def run(cluster: Cluster, cell: str, **options: Any) -> Any:
    """Begins a cell on all ranks."""
    return cluster.view.execute(textwrap.dedent(cell), silent=False, block=False, **options)


def printed(result: Any) -> list[str]:
    """Returns the output of each rank after the cell is done; raises `Failed` with the text of the errors."""
    try:
        result.get(timeout=TIMEOUT)
    except Exception as error:
        raise Failed(str(error)) from error
    result.wait_for_output(timeout=SOON)
    return [text.strip() for text in result.stdout]


def output(cluster: Cluster, cell: str) -> list[str]:
    return printed(run(cluster, cell))


def wait_until_printed(result: Any, text: str) -> None:
    """Waits until each rank has printed a text in a cell that is still running."""
    deadline = time.monotonic() + TIMEOUT
    while not all(text in each for each in result.stdout):
        assert time.monotonic() < deadline and not result.ready(), result.stdout
        time.sleep(0.02)


def interrupt_until_done(interrupt: Callable[[], None], result: Any) -> None:
    """Interrupts repeatedly: a signal that comes between Python's check and a sleep is noticed only after the sleep."""
    deadline = time.monotonic() + TIMEOUT
    while not result.ready():
        assert time.monotonic() < deadline, "an interrupt ends nothing"
        interrupt()
        result.wait(5)


def until_gone(handles: list[int]) -> None:
    """Waits until processes have ended, given their pidfds."""
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(1000 * SOON), "a process is left"
        os.close(handle)


def handles_of_family(pids: list[int]) -> list[int]:
    """Returns pidfds of the processes and of their descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(text.rpartition(")")[2].split()[1])
    family = set(pids)
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return [os.pidfd_open(pid) for pid in sorted(family)]


@pytest.fixture(scope="module", autouse=True)
def ipython_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps IPython from writing to the home directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with fogdist.interactive.start(SIZE, environment={"FLAVOUR": "lemon"}, timeout=TIMEOUT) as cluster:
        yield cluster
    assert not cluster.is_running


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """The cluster of all tests; its ranks are restarted if the last test ended some."""
    try:
        shared.check()
    except RuntimeError:
        shared.restart()
    output(
        shared,
        "import fogdist, os, time, torch, torch.distributed as dist, fogdist.bluefog.torch as bf\n"
        "fogdist.shutdown(); fogdist.init()",
    )
    return shared


# --- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": "4"}, TypeError, "size must be an integer, got '4'"),
        ({"size": True}, TypeError, "size must be an integer, got True"),
        ({"size": 0}, ValueError, "size must be an integer >= 1, got 0"),
        ({"size": 1, "environment": ["A"]}, TypeError, r"environment must be a dict .* got \['A'\]"),
        ({"size": 1, "environment": {"A": 1}}, TypeError, "environment must be a dict .* got {'A': 1}"),
        ({"size": 1, "timeout": "1"}, TypeError, "timeout must be a number of seconds, got str"),
        ({"size": 1, "timeout": 0.0}, ValueError, "timeout must be above 0 seconds, got 0"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fogdist.interactive.start(**options)


def test_without_ipyparallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(ImportError, match=r"needs ipyparallel.*pip install 'fogdist\[notebook\]'"):
        fogdist.interactive.start(1)
    assert not fogdist.interactive.running()


def test_the_door_without_ranks() -> None:
    assert not fogdist.interactive.running()
    with pytest.raises(RuntimeError, match=r"no ranks.*fogdist\.interactive\.start"):
        interrupt_through_the_door()


# --- ranks --------------------------------------------------------------------------------------------------


@with_notebooks
def test_ranks_have_what_torchrun_gives(cluster: Cluster) -> None:
    cell = """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FLAVOUR"]
        print(*[os.environ[name] for name in names], os.getpid(), fogdist.rank(), fogdist.size())
        print(bf.allreduce(torch.ones(1), average=False).item(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    """
    texts = output(cluster, cell)
    for rank, text in enumerate(texts):
        first, second = text.splitlines()
        assert first == f"{rank} {rank} {SIZE} {SIZE} lemon {cluster.pids[rank]} {rank} {SIZE}"
        assert second == texts[0].splitlines()[1] and second.startswith("3.0 127.0.0.1 ")
    assert cluster.size == SIZE and cluster in fogdist.interactive.running()
    assert repr(cluster) == "<fogdist.interactive.Cluster of 3 ranks, running>"


@with_notebooks
def test_interrupt_ends_an_operation_that_hangs(cluster: Cluster) -> None:
    cell = """
        print("waits", flush=True)
        if fogdist.rank() == 1:
            time.sleep(1000)
        dist.barrier()
    """
    for interrupt in (cluster.interrupt, interrupt_through_the_door):
        result = run(cluster, cell)
        wait_until_printed(result, "waits")
        interrupt_until_done(interrupt, result)
        with pytest.raises(Failed) as caught:
            printed(result)
        for rank in range(SIZE):
            # A rank may learn that another one was interrupted before it is interrupted itself.
            assert re.search(rf"\[{rank}:execute\](KeyboardInterrupt|DistBackendError)", str(caught.value))
        assert "[1:execute]KeyboardInterrupt" in str(caught.value)
        # The processes are the same, and a new group works.
        assert output(cluster, "fogdist.shutdown(); fogdist.init(); print(fogdist.size())") == ["3"] * SIZE
    # A rank can be interrupted while the others run nothing.
    result = run(cluster, 'print("waits", flush=True); time.sleep(1000 if fogdist.rank() == 2 else 0)')
    wait_until_printed(result, "waits")
    interrupt_until_done(cluster.interrupt, result)
    with pytest.raises(Failed) as caught:
        printed(result)
    assert re.findall(r"\[(\d):execute\]", str(caught.value)) == ["2"]


@with_notebooks
def test_an_interrupt_beside_a_cell_loses_no_answer(cluster: Cluster) -> None:
    """Regression: an interrupt while an engine read a request, or answered it, lost the answer."""
    for number in range(40):
        result = run(cluster, "x = sum(range(1000))")
        time.sleep(number * 5e-4)
        cluster.interrupt()
        try:
            printed(result)
        except Failed as error:
            assert "KeyboardInterrupt" in str(error)
    assert output(cluster, "print(fogdist.rank())") == ["0", "1", "2"]


def interrupt_through_the_door() -> None:
    from fogdist.bluefog.run import interrupt_hanged_processes

    interrupt_hanged_processes()


def seconds_of_cores(cluster: Cluster) -> float:
    """Returns the CPU seconds that all ranks have used so far."""
    ticks = 0
    for pid in cluster.pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@with_notebooks
def test_ranks_that_run_no_cell_use_no_core(cluster: Cluster) -> None:
    """BlueFog needed `suspend` because its ranks had a thread that was always busy."""
    output(cluster, 'bf.win_create(torch.ones(4), "w"); bf.win_put(torch.ones(4), "w")')
    time.sleep(0.5)
    before = seconds_of_cores(cluster)
    time.sleep(2)
    used = (seconds_of_cores(cluster) - before) / SIZE
    output(cluster, "bf.win_free()")
    assert used < 0.2  # a busy thread would use 2, or its share of a busy machine


@with_notebooks
def test_a_killed_rank_is_named(cluster: Cluster) -> None:
    result = run(
        cluster,
        """
        print("waits", flush=True)
        if fogdist.rank() == 1:
            time.sleep(1000)
        dist.barrier()
        """,
    )
    wait_until_printed(result, "waits")
    handles = handles_of_family(cluster.pids)
    old = cluster.pids
    os.kill(old[1], signal.SIGKILL)
    with pytest.raises(Failed) as caught:
        printed(result)
    text = str(caught.value)
    assert "Engine 1 died" in text and re.search(r"\[0:execute\]DistBackendError: .*rank 1 .* was lost", text)
    for call in (cluster.check, lambda: run(cluster, "1")):
        with pytest.raises(RuntimeError, match=r"^rank 1 ended by SIGKILL\. cluster\.restart\(\)"):
            call()
    cluster.interrupt()
    os.killpg(old[0], signal.SIGSTOP)
    cluster.restart()
    until_gone(handles)
    assert not set(old) & set(cluster.pids)
    # The new ranks are new processes, in which nothing is defined.
    assert output(cluster, "print('fogdist' in dir())") == ["False"] * SIZE
    assert output(cluster, "import fogdist; fogdist.init(); print(fogdist.rank())") == ["0", "1", "2"]


@with_notebooks
def test_a_cell_that_ends_its_rank(cluster: Cluster) -> None:
    with pytest.raises(Failed, match="Engine 2 died"):
        output(cluster, "if fogdist.rank() == 2: os._exit(7)")
    with pytest.raises(RuntimeError, match=r"^rank 2 ended with exit status 7"):
        cluster.check()


@with_notebooks
def test_a_rank_that_cannot_start() -> None:
    with pytest.raises(
        RuntimeError, match=r"(?s)ended with exit status 1 while the cluster started.*No module"
    ):
        fogdist.interactive.start(1, environment={"PYTHONHOME": "/nowhere"}, timeout=TIMEOUT)
    before = set(Path(tempfile.gettempdir()).glob("fogdist-interactive-*"))
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s: waiting for ipyparallel's controller"):
        fogdist.interactive.start(1, timeout=0.01)
    assert set(Path(tempfile.gettempdir()).glob("fogdist-interactive-*")) <= before


ENDS = """
import os, signal, sys
import fogdist.interactive

cluster = fogdist.interactive.start(2, timeout=100)
if "stopped" in sys.argv:
    for pid in cluster.pids:
        os.killpg(pid, signal.SIGSTOP)
print(*cluster.pids, cluster._processes[0].folder, flush=True)
sys.stdin.readline()
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "dropped" in sys.argv:
    del cluster
    assert not fogdist.interactive.running()
    print("goes on", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["killed stopped", "exits", "dropped"])
@with_notebooks
def test_nothing_is_left_of_a_notebook_that_is_gone(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS, *how.split()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        *pids, folder = process.stdout.readline().split()
        handles = handles_of_family([int(pid) for pid in pids])
        assert len(handles) > 4  # each engine has a process beside it
        process.stdin.write("\n")
        process.stdin.flush()
        if how == "dropped":
            assert process.stdout.readline() == "goes on\n"
        until_gone(handles)
        deadline = time.monotonic() + SOON
        while Path(folder).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.stdin.close()


# --- notebooks ----------------------------------------------------------------------------------------------


def texts_of(notebook: Any) -> list[str]:
    """Returns the output of each code cell of a notebook that was run."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts = [
                each.get("text", "") or each.get("data", {}).get("text/plain", "") for each in cell.outputs
            ]
            texts.append("".join(parts))
    return texts


def run_notebook(notebook: Any, folder: Path) -> list[str]:
    """Runs all cells as Jupyter does; returns the output of the code cells."""
    import nbclient

    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return texts_of(notebook)


@with_notebooks
def test_cells_that_are_run_again(tmp_path: Path) -> None:
    """%%px works at once, and cells that make an optimizer or start the ranks can be run again."""
    import nbformat

    begin = "import fogdist.interactive\ncluster = fogdist.interactive.start(2)"
    setup = "%%px\nimport fogdist, torch, fogdist.bluefog.torch as bf\nfogdist.init()\n"
    setup += "model = torch.nn.Linear(2, 1)\nprint('rank', fogdist.rank())"
    make = "%%px\nsgd = torch.optim.SGD(model.parameters(), lr=0.1)\noptimizer = {}\nold = optimizer\n"
    train = """
    %%px
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    print("trained", model.weight.isfinite().all().item())
    """
    calls = [
        "fogdist.DecentralizedOptimizer(sgd, model)",
        'fogdist.DecentralizedOptimizer(sgd, model, order="atc")',
        "bf.DistributedWinPutOptimizer(sgd, model)",
        "bf.DistributedGradientAllreduceOptimizer(sgd, model)",
    ]
    cells = [begin, setup, begin, setup]
    for call in calls:
        cells += [make.format(call), train, make.format(call), make.format(call), train]
    cells += ["print(len(fogdist.interactive.running()))\ncluster.stop()"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    )
    texts = run_notebook(notebook, tmp_path)
    for setup_text in (texts[1], texts[3]):
        for rank in range(2):
            assert re.search(rf"\[stdout:{rank}\]\s*rank {rank}\n", setup_text), setup_text
    assert sum("trained True" in text for text in texts) == 2 * len(calls)
    assert texts[-1].strip() == "1"


@with_notebooks
def test_notebook() -> None:
    import nbformat

    folder = ROOT / "examples" / "notebooks"
    notebook = nbformat.read(folder / "hello_world.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept"
    shown = "\n".join(run_notebook(notebook, folder))
    assert all(f"rank {rank} of 4 hears from the ranks" in shown for rank in range(4))
    assert shown.count("1.5000") == 4
    lines = re.findall(r"y = ([\d.]+) x \+ ([\d.]+), consensus distance ([\d.e+-]+)", shown)
    assert len(lines) == 4
    for slope, offset, distance in lines:
        assert abs(float(slope) - 2) < 0.2 and abs(float(offset) - 1) < 0.1 and float(distance) < 0.1
    assert "[0:execute]KeyboardInterrupt" in shown
    assert shown.count("4.0") == 4

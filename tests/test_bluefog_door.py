"""Tests of `import bluefog` through fogdist: its names, call forms of all versions, and published snippets."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import fogdist
import fogdist.bluefog
import fogdist.bluefog.__main__ as runner
import pytest
import torch
from fogdist import topology as topologies
from fogdist.bluefog.deprecation import warn_once
from fogdist.bluefog.run import fog_run
from harness import WorldPool, on_ranks
from reference import Checks
from scripts import run_script
from torch import Tensor
from training_cases import Simulation, make_net, sgd, train_step

bf: Any = importlib.import_module("bluefog.torch")

RANKS = 4
# The names that bluefog.torch 0.3 exports, names of older versions, and names that only its modules have.
NAMES_0_3 = """
CommunicationType DistributedAdaptThenCombineOptimizer DistributedAdaptWithCombineOptimizer DistributedAllreduceOptimizer
DistributedGradientAllreduceOptimizer DistributedHierarchicalNeighborAllreduceOptimizer DistributedNeighborAllreduceOptimizer
DistributedWinPutOptimizer
init shutdown size local_size rank local_rank machine_size machine_rank load_topology set_topology load_machine_topology
set_machine_topology in_neighbor_ranks out_neighbor_ranks in_neighbor_machine_ranks out_neighbor_machine_ranks
mpi_threads_supported unified_mpi_window_model_supported nccl_built is_homogeneous suspend resume
allreduce allreduce_nonblocking allreduce_ allreduce_nonblocking_ allgather allgather_nonblocking broadcast
broadcast_nonblocking broadcast_ broadcast_nonblocking_ neighbor_allgather neighbor_allgather_nonblocking neighbor_allreduce
neighbor_allreduce_nonblocking hierarchical_neighbor_allreduce hierarchical_neighbor_allreduce_nonblocking poll synchronize
wait barrier
win_create win_free win_update win_update_then_collect neighbor_win_put neighbor_win_put_nonblocking neighbor_win_get
neighbor_win_get_nonblocking neighbor_win_accumulate neighbor_win_accumulate_nonblocking win_put win_put_nonblocking win_get
win_get_nonblocking win_accumulate win_accumulate_nonblocking win_wait win_poll win_mutex get_win_version
get_current_created_window_names win_associated_p turn_on_win_ops_with_associated_p turn_off_win_ops_with_associated_p
set_skip_negotiate_stage get_skip_negotiate_stage timeline_start_activity timeline_end_activity timeline_context
broadcast_optimizer_state broadcast_parameters allreduce_parameters
GetRecvWeights GetSendWeights IsRegularGraph IsTopologyEquivalent ExponentialTwoGraph ExponentialGraph FullyConnectedGraph
MeshGrid2DGraph RingGraph StarGraph SymmetricExponentialGraph GetDynamicOnePeerSendRecvRanks
GetExp2DynamicSendRecvMachineRanks GetInnerOuterRingDynamicSendRecvRanks GetInnerOuterExpo2DynamicSendRecvRanks
InferSourceFromDestinationRanks InferDestinationFromSourceRanks
"""
OLDER_NAMES = """
DistributedBluefogOptimizer DistributedConsensusOptimizer allgather_async allreduce_async broadcast_async broadcast_async_
neighbor_allgather_async neighbor_allreduce_async win_accumulate_async win_get_async win_put_async win_sync
win_sync_then_collect broadcast_object broadcast_object_list win_read_neighbor win_cancel is_available
"""
UNEXPORTED_NAMES = """
pair_gossip pair_gossip_nonblocking win_lock is_topo_weighted is_machine_topo_weighted DistributedPushSumOptimizer
DistributedPullGetOptimizer
"""


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# --- the package -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is now called:DeprecationWarning")
def test_names_are_there() -> None:
    for name in (NAMES_0_3 + OLDER_NAMES + UNEXPORTED_NAMES).split():
        assert callable(getattr(bf, name)), name
    assert set(NAMES_0_3.split()) <= set(bf.__all__) <= set(dir(bf))
    with pytest.raises(AttributeError, match=r"bluefog\.torch.*win_fence"):
        bf.win_fence  # noqa: B018


def test_modules_are_found_in_every_form_of_import() -> None:
    found: dict[str, Any] = {}
    lines = """
        import bluefog
        import bluefog.torch as bf
        import bluefog.torch.mpi_ops as ops
        import bluefog.common.topology_util
        import bluefog.torch.ddp, bluefog.torch.optim
        from bluefog import torch as of_package
        from bluefog.common import topology_util, util
        from bluefog.common.basics import BlueFogBasics, logger
        from bluefog.common.util import check_extension
        from bluefog.torch import mpi_ops, optimizers, utility, torch as of_torch
        from bluefog.torch.mpi_ops import pair_gossip
        from bluefog.torch.optimizers import DistributedPushSumOptimizer
        from bluefog.torch.ddp import DecentralizedDataParallel, LocalStepRandomBatchSampler
        from bluefog.torch.ddp import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE
        from bluefog.run.interactive_run import interrupt_hanged_processes
        from bluefog.run.run import main
        from bluefog.common.topology_util import *
    """
    exec(textwrap.dedent(lines), found)
    assert found["bf"] is found["of_package"] is found["ops"] is found["mpi_ops"] is found["bluefog"].torch
    assert found["optimizers"].CommunicationType is bf.CommunicationType
    assert found["pair_gossip"] is bf.pair_gossip
    assert found["StarGraph"] is found["topology_util"].StarGraph is bf.StarGraph
    assert found["RingGraph"] is found["topology_util"].RingGraph is bf.RingGraph
    assert found["BlueFogBasics"]("mpi_lib").rank is fogdist.rank and found["of_torch"] is torch
    assert found["check_extension"]("bluefog.torch", "", "mpi_lib") is None
    assert issubclass(found["DecentralizedDataParallel"], fogdist.DecentralizedDataParallel)
    with pytest.warns(
        DeprecationWarning, match=r"bluefog\.common\.topology_util\.PowerGraph.*ExponentialGraph"
    ):
        assert found["topology_util"].PowerGraph is bf.ExponentialGraph
    with pytest.raises(RuntimeError, match=r"fogdist\.interactive\.start"):
        found["interrupt_hanged_processes"]()
    with pytest.raises(ImportError):
        importlib.import_module("bluefog.tensorflow")


def test_fogdist_does_not_grow_for_it() -> None:
    new = {"set_skip_negotiate_stage", "DistributedConsensusOptimizer", "suspend", "broadcast_object"}
    assert not new & set(fogdist.__all__) and new <= set(bf.__all__)
    code = "import sys, fogdist; assert not [n for n in sys.modules if 'bluefog' in n]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


REAL = """
import sys, warnings
import bluefog
assert bluefog.is_real
try:
    import fogdist.bluefog
except ImportError as error:
    assert "imported before bluefog" in str(error) and bluefog.__file__ in str(error), error
else:
    raise AssertionError("no ImportError")
del sys.modules["bluefog"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fogdist.bluefog
(warning,) = [w for w in caught if "left alone" in str(w.message)]
assert warning.filename == "<string>", warning.filename
import bluefog.torch
assert not hasattr(bluefog, "is_real")
assert bluefog.torch.win_put.__module__.startswith("fogdist")
"""


def test_real_bluefog_is_not_mixed_in(tmp_path: Path) -> None:
    (tmp_path / "bluefog").mkdir()
    (tmp_path / "bluefog" / "__init__.py").write_text("is_real = True\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


SCRIPT = """
import sys
import helper  # beside the script
import bluefog.torch as bf

assert __name__ == "__main__" and sys.modules["__main__"].bf is bf
bf.init()
print(f"rank {bf.rank()} of {bf.size()}: {sys.argv[1:]}, {helper.value}")
sys.exit(0 if sys.argv[0].endswith("script.py") else 3)
"""


@pytest.mark.parametrize("launcher", ["world", pytest.param("torchrun", marks=pytest.mark.long)])
def test_script_runs_as_main(tmp_path: Path, script_worlds: WorldPool, launcher: str) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("value = 17\n")
    script = tmp_path / "scripts" / "script.py"
    script.write_text(SCRIPT)
    how = script_worlds if launcher == "world" else launcher
    output = behind_the_door(script, "--lr", "0.1", ranks=2, log=tmp_path / "log.txt", launcher=how)
    lines = re.findall(r"rank \d of 2: \[.*?\], \d+", output)  # the ends of lines may arrive late
    assert sorted(lines) == [f"rank {rank} of 2: ['--lr', '0.1'], 17" for rank in (0, 1)], output


def behind_the_door(script: Path, *arguments: str, ranks: int, log: Path, launcher: str | WorldPool) -> str:
    """Returns the output of a script that is run by `python -m fogdist.bluefog script`."""
    words = ["-m", "fogdist.bluefog"] if launcher == "torchrun" else [runner.__file__]
    return run_script([*words, script, *arguments], ranks, log, launcher)


END = """
import sys
import time
import torch
import bluefog.torch as bf

bf.init()
x = torch.ones(2)
bf.win_create(x, "x")
for _ in range(200 * bf.rank()):
    bf.win_put(x, "x")
    time.sleep(0.01)
print(f"rank {bf.rank()}: done")
"""


def test_early_rank_waits_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 ends 2 s before rank 1, which puts into its window until then."""
    monkeypatch.setenv("BLUEFOG_LOG_LEVEL", "trace")
    (tmp_path / "script.py").write_text(END)
    output = behind_the_door(tmp_path / "script.py", ranks=2, log=tmp_path / "log.txt", launcher="torchrun")
    assert output.count(": done") == 2 and "DEBUG fog_pg" in output and "WARNING" not in output, output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-np 4 python train.py -v", "--num-proc=4 -m fogdist.bluefog train.py -v"),
        (
            "-np 4 --use-infiniband --extra-mpi-flags=-x --verbose --timeline-filename=t train.py",
            "--num-proc=4 -xFOG_TIMELINE=t -xFOG_LOG_LEVEL=debug -m fogdist.bluefog train.py",
        ),
        (
            "-np 4 --prefix nice train.py",
            f"--num-proc=4 nice {sys.executable} -m fogdist.bluefog train.py",
        ),
        (
            "-np 2 -H a:1,b:1 -p 22 --extra-mpi-flags=-x train.py",
            "--num-proc=2 --ssh-port=22 --hosts=a:1,b:1 -m fogdist.bluefog train.py",
        ),
    ],
)
def test_bfrun_is_fog_run(words: str, expected: str) -> None:
    assert fog_run(words.split()) == expected.split()


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        ([], 2, f"fogdist.bluefog: error: needs a script\n{runner.USAGE}\n"),
        (["nowhere.py", "--lr"], 2, f"fogdist.bluefog: error: 'nowhere.py' is no file\n{runner.USAGE}\n"),
        (["--help"], None, runner.USAGE),
    ],
)
def test_usage(
    arguments: list[str],
    status: int | None,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fogdist.bluefog", *arguments])
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as exit_:
        runner.main()
    out, err = capsys.readouterr()
    assert err == printed and exit_.value.code == status if status else out.startswith(printed)


# --- without other ranks ------------------------------------------------------------------------------------


def test_environment_variables_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    env = importlib.import_module("bluefog.common.util").env
    monkeypatch.setenv("DOOR_A", "before")
    monkeypatch.delenv("DOOR_B", raising=False)
    with pytest.raises(KeyError), env(DOOR_A="in", DOOR_B="it", DOOR_C=None):
        assert (os.environ["DOOR_A"], os.environ["DOOR_B"], "DOOR_C" in os.environ) == ("in", "it", False)
        raise KeyError
    assert os.environ["DOOR_A"] == "before" and "DOOR_B" not in os.environ


def test_what_has_no_effect_any_more() -> None:
    assert bf.get_skip_negotiate_stage() is False
    bf.set_skip_negotiate_stage(True)
    assert bf.get_skip_negotiate_stage() is True
    bf.set_skip_negotiate_stage(False)
    assert bf.nccl_built() is torch.distributed.is_nccl_available()
    assert bf.mpi_threads_supported() is False and bf.unified_mpi_window_model_supported() is True
    assert bf.timeline_start_activity("x", "FORWARD") is False and bf.timeline_end_activity("x") is False
    with bf.timeline_context("x", "FORWARD"):
        bf.suspend()
        bf.resume()


def test_older_graphs_and_arguments() -> None:
    for ring, style in (
        (bf.RingGraph(4, True), 1),
        (bf.RingGraph(4, left_connect=False), 2),
        (bf.RingGraph(4), 0),
    ):
        assert bf.IsTopologyEquivalent(ring, bf.RingGraph(4, style))
    is_power_of = importlib.import_module("bluefog.common.topology_util").isPowerOf
    assert [x for x in range(1, 30) if is_power_of(x, 3)] == [1, 3, 9, 27]
    with pytest.raises(TypeError, match="old is deprecated in rank: new"):
        bf.deprecated_function_arg("old", "new")(bf.rank)(old=1)
    assert bf.deprecated_function_arg("old", "new")(bf.RingGraph)(4).number_of_nodes() == 4
    with pytest.raises(TypeError, match="topology_fn and topology must not both be given"):
        bf.init(bf.RingGraph(4), topology=bf.RingGraph(4))
    with pytest.raises(ValueError, match="exclusive must be True.*False"), bf.win_mutex("w", exclusive=False):
        pass
    assert bf.is_available()


def test_optimizers_want_a_model_or_parameters() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = dict(model.named_parameters())
    make = bf.DistributedNeighborAllreduceOptimizer
    with pytest.raises(TypeError, match="model and named_parameters"):
        make(optimizer, model, named_parameters=named.items())
    with pytest.raises(TypeError, match=r"pairs of name and parameter, got 'weight'"):
        make(optimizer, named)
    with pytest.raises(ValueError, match="num_steps_per_communication.*got 2"):
        make(optimizer, num_steps_per_communication=2, named_parameters=named.items())


# --- call forms ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_ranks(RANKS)
def test_call_forms_of_all_versions() -> None:
    """On a directed ring: rank r receives from r - 1 only."""
    bf.init(bf.RingGraph(RANKS, connect_style=2))  # takes a graph, as in BlueFog 0.1
    rank, size = bf.rank(), bf.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    x, total, mean = values(rank), size * (size - 1) / 2, (size - 1) / 2
    with Checks() as checks:
        checks.equal("topology", (bf.in_neighbor_ranks(), bf.out_neighbor_ranks()), ([before], [after]))
        for function in (bf.allreduce, bf.allreduce_, bf.allreduce_nonblocking, bf.allreduce_nonblocking_):
            finish = bf.synchronize if "nonblocking" in function.__name__ else lambda output: output
            checks.equal(function.__name__, finish(function(x.clone(), False, "a")), values(total))
            checks.equal(function.__name__, finish(function(x.clone(), True, None)), values(mean))
            checks.equal(function.__name__, finish(function(x.clone(), False, False, "a")), values(total))
        checks.equal("old name", bf.wait(bf.allreduce_async(x, False, "a")), values(total))
        checks.equal("of the machine", bf.allreduce(x, True, True), values(mean))

        checks.equal("gather", bf.neighbor_allgather(x, "g"), values(before))
        checks.equal("gather", bf.wait(bf.neighbor_allgather_nonblocking(x, name="g")), values(before))

        expected, weights = values(0.5 * rank + 0.25 * before), {before: 0.25}
        exchanges = [
            bf.neighbor_allreduce(x, 0.5, weights, "n"),
            bf.neighbor_allreduce(x, 0.5, weights, None, True, "n"),
            bf.neighbor_allreduce(x, 0.5, weights, [after], False),
            bf.neighbor_allreduce(x, 0.5, neighbor_weights=weights, name="n"),
            bf.neighbor_allreduce(x, self_weight=0.5, neighbor_weights=weights, send_neighbors=[after]),
            bf.neighbor_allreduce(x, self_weight=0.5, src_weights=weights, dst_weights={after: 1.0}),
            bf.wait(bf.neighbor_allreduce_nonblocking(x, 0.5, weights, "n")),
            bf.wait(bf.neighbor_allreduce_async(x, 0.5, weights, "n")),
        ]
        checks.equal("neighbor_allreduce", exchanges, [expected] * len(exchanges))
        checks.equal("mean", bf.neighbor_allreduce(x), values((rank + before) / 2))
        checks.equal("mean", bf.neighbor_allreduce(x, True, "n"), values((rank + before) / 2))
        checks.equal("sum", bf.neighbor_allreduce(x, average=False), values(rank + before))
        for wrong in (
            lambda: bf.neighbor_allreduce(x, 0.5, weights, src_weights=weights),
            lambda: bf.neighbor_allreduce(x, self_weight=0.5, src_weights=weights, neighbor_weights=weights),
            lambda: bf.neighbor_allreduce(x, 0.5, weights, None, True, "n", 1),
            lambda: bf.neighbor_allreduce(x, neighbor_weight=weights),
            lambda: bf.allreduce(x, True, 1),
        ):
            with pytest.raises(TypeError):
                wrong()

        objects = [{"rank": rank}, rank]
        checks.equal("object", bf.broadcast_object({"rank": rank}, size - 1), {"rank": size - 1})
        checks.equal("object", bf.broadcast_object(rank, src=1, device=torch.device("cpu")), 1)
        bf.broadcast_object_list([], None, torch.device("cpu"))
        bf.broadcast_object_list(objects, src=1)
        checks.equal("objects", objects, [{"rank": 1}, 1])
        for wrong_root in (size, -1):
            with pytest.raises(ValueError, match=f"src.*got {wrong_root}"):
                bf.broadcast_object_list([1], wrong_root)


@on_ranks(RANKS)
def test_machines_of_two() -> None:
    with fogdist.bluefog.common.env(BLUEFOG_NODES_PER_MACHINE="2"):
        bf.init()
    machine = bf.machine_rank()
    assert (bf.machine_size(), bf.local_size(), "FOG_NODES_PER_MACHINE" in os.environ) == (2, 2, False)
    x, other = values(bf.rank()), 1 - machine
    expected = values(0.75 * (2 * machine + 0.5) + 0.25 * (2 * other + 0.5))
    for average in (
        bf.hierarchical_neighbor_allreduce(x, 0.75, {other: 0.25}, [other]),
        bf.hierarchical_neighbor_allreduce(
            x, 0.75, neighbor_machine_weights={other: 0.25}, send_neighbor_machines=[other]
        ),
        bf.wait(bf.hierarchical_neighbor_allreduce_nonblocking(x, 0.75, {other: 0.25}, [other], False, "h")),
    ):
        assert torch.equal(average, expected)
    bf.init()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@on_ranks(RANKS)
def test_window_call_forms_of_all_versions() -> None:
    bf.init(topology=bf.RingGraph(RANKS, connect_style=2))  # as in BlueFog 0.1
    rank, size = bf.rank(), bf.size()
    before, after = (rank - 1) % size, (rank + 1) % size

    def slot() -> Tensor:
        bf.barrier()
        found = bf.win_read_neighbor("w", before)
        bf.barrier()
        return found

    with Checks() as checks:
        checks.true("made", bf.win_create(values(rank), "w", True))
        for number, (write, arguments) in enumerate(
            [
                (bf.win_put, ({after: 2.0}, True)),
                (bf.win_put, ({after: 2.0},)),
                (bf.neighbor_win_put, (1.0, {after: 2.0}, True)),
                (bf.win_put_nonblocking, ({after: 2.0}, True)),
                (bf.neighbor_win_put_nonblocking, (None, {after: 2.0})),
                (bf.win_put_async, ({after: 2.0}, False)),
            ]
        ):
            done = write(values(rank + number), "w", *arguments)
            checks.true(f"put {number}", done if done is True else bf.win_wait(done))
            checks.equal(f"put {number}", slot(), values(2.0 * (before + number)))
        bf.win_cancel(bf.win_put_nonblocking(values(rank), "w", None, True))
        checks.equal("no weights", slot(), values(before))
        for number, write in enumerate(
            [bf.win_accumulate, bf.win_accumulate_nonblocking, bf.win_accumulate_async]
        ):
            done = write(values(1.0), "w", {after: 0.5}, True)
            checks.true(f"accumulate {number}", done if done is True else bf.win_wait(done))
            checks.equal(f"accumulate {number}", slot(), values(before + 0.5 * (number + 1)))
        for get in (bf.win_get, bf.win_get_nonblocking, bf.win_get_async):
            done = get("w", {before: 3.0, rank: 1.0}, True)
            checks.true("got", done if done is True else bf.win_wait(done))
            checks.equal("got", slot(), values(3.0 * before))
        warn_once.cache_clear()
        with pytest.warns(DeprecationWarning, match="own weight has no effect"):
            bf.win_get("w", {before: 1.0, rank: 0.5})
        bf.barrier()
        checks.equal("win_sync", bf.win_sync("w", 0.5, {before: 0.5}, True), values((rank + before) / 2))
        checks.equal("reset", slot(), values(0.0))
        for wrong in (
            lambda: bf.win_put(values(1), "w", {after: 1.0}, {after: 1.0}),
            lambda: bf.win_put(values(1), 3),
        ):
            with pytest.raises(TypeError):
                wrong()
        bf.win_free()


@on_ranks(RANKS, kind=["default", "ranks", "own", "all", "for_self"])
def test_mutexes_without_a_name_do_not_block_each_other(kind: str) -> None:
    """Ranks that hold mutexes put, or check values that must not change. They would hang if they blocked each other."""
    bf.init()
    rank, inside, outside = bf.rank(), bf.in_neighbor_ranks(), bf.out_neighbor_ranks()
    for name in ("v", "w"):
        bf.win_create(values(0.0), name, zero_init=True)
    held = {
        "default": lambda: bf.win_mutex(),
        "ranks": lambda: bf.win_mutex(outside, exclusive=True),
        "own": lambda: bf.win_mutex([rank]),
        "all": lambda: bf.win_mutex(list(range(bf.size()))),
        "for_self": lambda: bf.win_mutex(for_self=True),
    }[kind]
    for number in range(50):
        with held():
            seen = [bf.win_update("w", 0.0, dict.fromkeys(inside, 1.0), clone=True) for _ in range(2)]
            assert torch.equal(*seen)
            bf.win_sync_then_collect("w")
            if kind not in ("own", "for_self"):
                bf.win_put(values(float(number)), "w", require_mutex=True)
        bf.win_put(values(float(number)), "w", require_mutex=True)
    bf.barrier()
    bf.win_free()


@on_ranks(3, held=[None, [0]])
def test_mutex_without_a_window_is_one_for_each_rank(held: list[int] | None) -> None:
    """Rank 0 holds mutexes while rank 1 asks for one of these, and rank 2 perhaps for another one."""
    bf.init(lambda size: bf.FullyConnectedGraph(size))
    rank = bf.rank()
    if rank == 0:
        with bf.win_mutex(held):
            bf.barrier()
            begin = time.monotonic()
            time.sleep(0.5)
            end = time.monotonic()
    else:
        bf.barrier()
        with bf.win_mutex([1] if held and rank == 2 else held):
            begin = end = time.monotonic()
    # The ranks of a test share a host, and so its clock.
    times = bf.allgather(values(begin, end)).tolist()
    assert times[2] >= times[1]
    assert (times[4] >= times[1]) == (held is None)


@on_ranks(2)
def test_mutex_without_a_name_is_of_all_windows() -> None:
    """Returns whether a neighbor's put into any window waits for a block of `win_mutex` without a name."""
    bf.init()
    rank = bf.rank()
    for name in ("v", "w"):
        bf.win_create(values(0.0), name, zero_init=True)
    handles = []
    if rank == 1:
        with bf.win_mutex([1]):
            bf.allreduce(values(0.0))  # rank 0 begins its puts between the two
            bf.allreduce(values(0.0))
            seen = [bf.get_win_version(name)[0] for name in ("v", "w")]
    else:
        bf.allreduce(values(0.0))
        handles = [bf.win_put_nonblocking(values(1.0), name, require_mutex=True) for name in ("v", "w")]
        waits = not any(map(bf.win_poll, handles))
        bf.allreduce(values(0.0))
        seen = [0, 0] if waits else [1, 1]
    for handle in handles:
        bf.win_wait(handle)
    bf.barrier()
    bf.win_free()
    assert seen == [0, 0]


@on_ranks(2)
def test_barrier_waits_for_operations_in_flight() -> None:
    """Returns whether a put is complete after the barrier, although the target's mutex delayed it."""
    bf.init()
    bf.win_create(torch.zeros(4), "barrier")
    holds, keeper, handle = threading.Event(), None, None

    def hold() -> None:
        with bf.win_lock("barrier"):
            holds.set()
            time.sleep(0.5)

    if bf.rank() == 1:
        keeper = threading.Thread(target=hold)
        keeper.start()
        holds.wait()
    bf.barrier()
    if bf.rank() == 0:
        handle = bf.win_put_nonblocking(torch.ones(4), "barrier", require_mutex=True)
    bf.barrier()
    is_complete = handle is None or (bf.win_poll(handle) and bf.win_wait(handle))
    if keeper is not None:
        keeper.join()
    bf.win_free("barrier")
    assert is_complete


@on_ranks(2)
def test_old_keywords_warn_once() -> None:
    bf.init()
    warn_once.cache_clear()
    x, weights = values(1.0), dict.fromkeys(bf.in_neighbor_ranks(), 0.25)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            bf.neighbor_allreduce(x, 0.5, neighbor_weights=weights, send_neighbors=bf.out_neighbor_ranks())
    assert all(warning.filename == __file__ for warning in caught)
    assert [str(warning.message).split(";")[0] for warning in caught] == [
        "neighbor_allreduce: 'neighbor_weights' is called 'src_weights' now",
        "neighbor_allreduce: 'send_neighbors' is called 'dst_weights' now",
    ]


# --- optimizers ---------------------------------------------------------------------------------------------

OLDER = {
    "DistributedAllreduceOptimizer": "gradient",
    "DistributedNeighborAllreduceOptimizer": "awc",
    "DistributedConsensusOptimizer": "awc",
    "DistributedBluefogOptimizer": "awc",
}


@on_ranks(RANKS, factory=OLDER, how=["model", "modules", "by position", "by name", "neither"])
def test_optimizers_of_older_versions(factory: str, how: str) -> None:
    """If parameters are passed by name, the step exchanges the parameters at which the gradient was computed."""
    bf.init(lambda size: bf.RingGraph(size, connect_style=2))
    rank, of_model = bf.rank(), how in ("model", "modules")
    model = make_net(rank)
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "model": ((model,), {}),
        "modules": (([model],), {"num_steps_per_communication": 1}),
        "by position": ((model.named_parameters(),), {}),
        "by name": ((), {"named_parameters": model.named_parameters()}),
        "neither": ((), {}),
    }
    given, named = arguments[how]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = getattr(bf, factory)(sgd(model), *given, **named)
    if factory == "DistributedBluefogOptimizer":
        optimizer.force_barrier = True
    averages_all = factory == "DistributedAllreduceOptimizer"
    graph = bf.FullyConnectedGraph(RANKS) if averages_all else bf.RingGraph(RANKS, connect_style=2)
    rule = "awc" if of_model else OLDER[factory]
    simulation = Simulation(rule, map(make_net, range(RANKS)), sgd, topologies.mixing_matrix(graph))
    for step in range(5):
        train_step(model, optimizer, rank, step)
        simulation.train(step)
        simulation.check(rank, model)
    if hasattr(optimizer, "unregister_window"):
        optimizer.unregister_window()


@on_ranks(RANKS)
def test_communication_by_methods() -> None:
    """Compares the parameter after one step of each kind; ranks begin with their numbers, and gradients are zero."""
    bf.init(lambda size: bf.RingGraph(size, connect_style=2))
    found = []
    before = (bf.rank() - 1) % RANKS
    for kind, name in (
        ("allreduce", "DistributedNeighborAllreduceOptimizer"),
        ("neighbor_allreduce", "DistributedAllreduceOptimizer"),
        ("empty_function", "DistributedHierarchicalNeighborAllreduceOptimizer"),
        ("allreduce", "DistributedAdaptThenCombineOptimizer"),
        ("allreduce", "DistributedAdaptWithCombineOptimizer"),
    ):
        model = torch.nn.Linear(1, 1, bias=False).double()
        model.weight.data.fill_(float(bf.rank()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        warns = pytest.warns(PendingDeprecationWarning, match="is DistributedAdaptWithCombineOptimizer")
        with contextlib.nullcontext() if "Adapt" in name else warns:
            optimizer = getattr(bf, name)(optimizer, model)
        if "Adapt" in name:
            optimizer.communication_type = bf.CommunicationType[kind]
        else:
            getattr(optimizer, f"use_{kind}_in_communication")()
        optimizer.self_weight, optimizer.src_weights = 0.25, {before: 0.75}  # for neighbors only
        model(torch.zeros(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        found.append(model.weight.item())
    rank = bf.rank()
    assert found == [1.5, 0.25 * rank + 0.75 * before, rank, 1.5, 1.5]


@on_ranks(RANKS)
def test_window_optimizer_stays_in_pace() -> None:
    """A regression comes as close as its noise, as in BlueFog's own test, only if no rank runs ahead of its neighbors."""
    bf.init()
    torch.manual_seed(0)
    truth, noise = torch.randn(16, 3), 1e-5
    torch.manual_seed(1 + bf.rank())
    x = torch.randn(1024, 16)
    batches = [(part, part @ truth + noise * torch.randn(len(part), 3)) for part in x.split(128)]
    model = torch.nn.Linear(16, 3)
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * RANKS)
    optimizer = bf.DistributedWinPutOptimizer(optimizer, model)
    for _ in range(50):
        losses = []
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = bf.allreduce(torch.stack(losses).mean())
    optimizer.unregister_window()
    assert mean < 1.5 * noise**2


@on_ranks(2)
def test_passes_by_their_old_name() -> None:
    bf.init()
    model = torch.nn.Linear(1, 1, bias=False).double()
    model.weight.data.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.warns(DeprecationWarning, match="backward_passes_per_step"):
        optimizer = bf.DistributedGradientAllreduceOptimizer(optimizer, model, backward_passes_per_step=2)
    for _ in range(2):
        model(torch.full((1, 1), float(bf.rank()), dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -1.0


# --- published snippets -------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch import optim
import bluefog.torch as bf
from bluefog.common import topology_util

torch.manual_seed(0)
bf.init()
truth = torch.tensor([[1.0], [-2.0], [3.0]])
torch.manual_seed(1 + bf.rank())
inputs = torch.randn(256, 3)
train_loader = [(x, x @ truth) for x in inputs.split(32)]
model = torch.nn.Linear(3, 1)
bf.broadcast_parameters(model.named_parameters(), root_rank=0)
optimizer = optim.SGD(model.parameters(), lr=0.02 * bf.size())
optimizer = bf.DistributedNeighborAllreduceOptimizer(
    optimizer, model=model
)
dynamic_neighbors_gen = topology_util.GetInnerOuterExpo2DynamicSendRecvRanks(
    bf.size(), local_size=bf.local_size(), self_rank=bf.rank())

def dynamic_topology_update(epoch, batch_idx):
    send_neighbors, recv_neighbors = next(dynamic_neighbors_gen)
    avg_weight = 1/(len(recv_neighbors) + 1)
    optimizer.send_neighbors = send_neighbors
    optimizer.neighbor_weights = {r: avg_weight for r in recv_neighbors}
    optimizer.self_weight = avg_weight

for epoch in range(30):
    for batch_idx, (data, target) in enumerate(train_loader):
        dynamic_topology_update(epoch, batch_idx)
        optimizer.zero_grad()
        loss = (model(data) - target).square().mean()
        loss.backward()
        optimizer.step()
bf.barrier()
error = (model.weight.detach().T - truth).norm().item()
assert error < 1e-2, error
print(f"rank {bf.rank()}: close")
"""
PUSH_SUM = """
import time
import torch
import bluefog.torch as bf
from bluefog.common import topology_util

bf.init()
bf.set_topology(topology_util.PowerTwoRingGraph(bf.size()))
outdegree = len(bf.out_neighbor_ranks())
indegree = len(bf.in_neighbor_ranks())

x = torch.Tensor([bf.rank(), 1.0])
bf.win_create(x, name="x_buff", zero_init=True)

for _ in range(100):
    bf.win_accumulate(
        x, name="x_buff",
        dst_weights={rank: 1.0 / (outdegree + 1)
                     for rank in bf.out_neighbor_ranks()},
        require_mutex=True)
    x.div_(1+outdegree)
    bf.win_sync_then_collect(name="x_buff")
    bf.barrier()  # so that the ranks, which share few cores here, stay in step

bf.barrier()
bf.win_sync_then_collect(name="x_buff")
mass = bf.allreduce(x, False, "mass")
assert abs(mass[0] - 6) < 1e-4 and abs(mass[1] - 4) < 1e-4, mass
assert abs(x[0] / x[-1] - 1.5) < 1e-4, x
print(f"rank {bf.rank()}: close")
"""
MUTEX = """
import torch
import bluefog.torch as bf

bf.init()
tensor, name = torch.Tensor([bf.rank()]), "mutex"
bf.win_create(tensor, name)
bf.win_put(tensor, name)
bf.barrier()
with bf.win_mutex():
    tensor = bf.win_sync_then_collect(name)
expected = bf.rank() + sum(bf.in_neighbor_ranks())
assert tensor.item() == expected, (tensor, expected)
bf.barrier()
bf.win_put(tensor, name)
with bf.win_lock(name):
    pass
bf.barrier()
print(f"rank {bf.rank()}: close")
"""
SNIPPETS = {"push-sum": PUSH_SUM, "mutex": MUTEX, "training": TRAINING}


@pytest.mark.parametrize("snippet", list(SNIPPETS))
def test_published_snippets(tmp_path: Path, script_worlds: WorldPool, snippet: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SNIPPETS[snippet])
    output = behind_the_door(script, ranks=RANKS, log=tmp_path / "log.txt", launcher=script_worlds)
    assert sorted(re.findall(r"rank \d: close", output)) == [
        f"rank {rank}: close" for rank in range(RANKS)
    ], output


def test_door_modules_are_one_each() -> None:
    """`fogdist.bluefog` and `bluefog` are the same modules, not two copies with separate states."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "bluefog":
            assert isinstance(module, ModuleType) and module.__name__.startswith("fogdist.bluefog"), name

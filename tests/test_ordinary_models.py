"""A wrapped model stays an ordinary model: tools for modules, parameters and state dicts do what they did before the wrap.

Each way to train with others runs with all tools, one after the other, and trains on between them. Each tool checks its own
result, and in the end the parameters have to be those of a run without any tool.

`test_fsdp_gossip` has the wrap of FSDP2's modules, and `test_frameworks` the savers of accelerate and transformers.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.multiprocessing as mp
from harness import on_ranks
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import BLUEFOGS, ENTRIES, IN_STEP, WINDOWS, distribute, end, start


class Net(nn.Module):
    """A model with tied parameters, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.c = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


X = torch.linspace(-1, 1, 12).view(3, 4)
Call = Callable[[Tensor], Tensor]


class Run:
    """Training of a model in one of the ways."""

    def __init__(self, kind: str, make: Callable[[int], nn.Module] = make_net, **given: Any) -> None:
        rank, _ = start()
        self.model: Any = make(rank)
        self.kind = kind
        self.places = [(p, p.data_ptr(), p.untyped_storage().nbytes()) for p in self.model.parameters()]
        base = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.called: Any = self.model
        self.optimizer: Any = base
        if kind == "hook":
            self.called = nn.parallel.DistributedDataParallel(self.model)
            self.called.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
        else:
            way, options = ("wrapper", {"mode": "async"}) if kind == "async" else (kind, {})
            self.called, self.optimizer = distribute(way, base, self.model, **options, **given)

    def train(self, call: Call | None = None, passes: int = 1) -> None:
        self.optimizer.zero_grad()
        for number in range(passes):
            x = (X + number).requires_grad_()
            (call or self.called)(x).square().mean().backward()
        self.optimizer.step()

    def end(self) -> None:
        end(self.called, self.optimizer)


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- tools: each yields where training goes on by one step ---------------------------------------------------

Tool = Callable[[Run, Path], Iterator[None]]


def memory(run: Run, folder: Path) -> Iterator[None]:
    """Each parameter has the memory that it had before the wrap, and no more; tied ones are one."""
    yield
    assert [(p, p.data_ptr(), p.untyped_storage().nbytes()) for p in run.model.parameters()] == run.places
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in run.model.parameters())
    assert run.model.b.weight is run.model.a.weight
    assert not run.model._forward_hooks and not run.model._forward_pre_hooks


def copies(run: Run, folder: Path) -> Iterator[None]:
    want = values(run.model)
    made = copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model)), copy.copy(run.model)
    made[0](X).sum().backward()  # it is no pass of the model
    # A class that is pickled by its value, as cloudpickle does it, needs no fogdist where it is loaded.
    assert pickle.loads(pickle.dumps(vars(Net).get("_compiled_call_impl"))) is None
    yield
    for each in made[:2]:
        same(values(each), want)
        assert each.b.weight is each.a.weight
    same(values(made[2]), values(run.model))


def saved(run: Run, folder: Path) -> Iterator[None]:
    plain = make_net(0)
    for of in (lambda m: m, lambda m: m.state_dict(), lambda m: m.c.weight, lambda m: m.c.weight.detach()):
        sizes = []
        for model in (run.model, plain):
            file = io.BytesIO()
            torch.save(of(model), file)
            sizes.append(len(file.getvalue()))
        assert sizes[0] == sizes[1]
    yield


def safetensors(run: Run, folder: Path) -> Iterator[None]:
    want = values(run.model)
    save_model(run.model, folder / "model")
    other = make_net(9)
    load_model(other, folder / "model")
    same(values(other), want)
    untied = {name: value for name, value in run.model.state_dict().items() if name != "b.weight"}
    save_file(untied, folder / "state")
    same(load_file(folder / "state"), {name: want[name] for name in untied})
    yield


def in_a_child(read: Callable[[], Any]) -> Callable[[], Any]:
    """Forks a child; what is returned calls `read` there and returns its result."""
    (go_read, go_write), (result_read, result_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(go_read, 1)
            os.write(result_write, pickle.dumps(read()))
        finally:
            os._exit(0)

    def ask() -> Any:
        os.write(go_write, b"x")
        result = pickle.loads(os.read(result_read, 65536))
        os.waitpid(pid, 0)
        for each in (go_read, go_write, result_read, result_write):
            os.close(each)
        return result

    return ask


def forked(run: Run, folder: Path) -> Iterator[None]:
    """A child has the parameters of the time of the fork, and its changes are its own."""
    before = run.model.c.weight.tolist()

    def read() -> Any:
        found = run.model.c.weight.tolist()
        nn.init.zeros_(run.model.c.weight)
        return found

    ask = in_a_child(read)
    yield
    now = run.model.c.weight.tolist()
    assert ask() == before != now and run.model.c.weight.tolist() == now


def shared_with_processes(run: Run, folder: Path) -> Iterator[None]:
    """After ``share_memory`` another process sees each step."""
    run.model.share_memory()
    ask = in_a_child(lambda: run.model.c.weight.tolist())
    before = run.model.c.weight.tolist()
    yield
    assert ask() == run.model.c.weight.tolist() != before
    assert all(p.is_shared() for p in run.model.parameters())


def _spawned(model: nn.Module, pipe: Any) -> None:
    pipe.send(None)
    while pipe.recv():
        pipe.send(model.c.weight.tolist())


def spawned(run: Run, folder: Path) -> Iterator[None]:
    run.model.share_memory()
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=_spawned, args=(run.model, theirs), daemon=True)
    process.start()
    ours.recv()
    yield
    ours.send(True)
    assert ours.recv() == run.model.c.weight.tolist()
    ours.send(False)
    process.join()


def loaded(run: Run, folder: Path) -> Iterator[None]:
    run.model.load_state_dict(values(run.model))
    yield


def converted(run: Run, folder: Path) -> Iterator[None]:
    """Float32 is exact in float64. The next step has the dtype of the wrap again."""
    for swaps in (False, True)[
        : 1 + (run.kind != "hook")
    ]:  # DDP keeps references to the parameters' contents
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        try:
            run.model.double()
            assert run.model.eval()(X.double()).dtype == torch.float64
            run.model.train().float().to(memory_format=torch.contiguous_format)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    yield


def swapped(run: Run, folder: Path) -> Iterator[None]:
    run.optimizer.zero_grad()
    other = nn.Parameter(run.model.c.weight.detach().clone())
    if run.kind != "hook":
        torch.utils.swap_tensors(run.model.c.weight, other)
    yield
    assert not torch.equal(run.model.c.weight, other)


def scripted(run: Run, folder: Path) -> Iterator[None]:
    for make in (torch.jit.script, partial(torch.jit.trace, example_inputs=X)):
        file = io.BytesIO()
        torch.jit.save(make(run.model), file)
        file.seek(0)
        same(torch.jit.load(file)(X), run.model.eval()(X))
        run.model.train()
    yield


def exported(run: Run, folder: Path) -> Iterator[None]:
    for strict in (False, True):
        program = torch.export.export(run.model, (X,), strict=strict)
        same(program.module()(X), run.model.eval()(X))
        run.model.train()
    yield


def compiled(run: Run, folder: Path) -> Iterator[None]:
    """The compiled model trains as the model does, in one graph."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    same(torch.compile(run.model, fullgraph=True, backend=backend)(X), run.model(X))
    assert len(graphs) == 1
    twin = make_net(0)
    run.model.compile(fullgraph=True, backend=backend)
    yield
    assert len(graphs) == 2 and twin._compiled_call_impl is None
    vars(run.model).pop("_compiled_call_impl")


def quantized(run: Run, folder: Path) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.ao.quantization.quantize_dynamic(run.model, {nn.Linear})
        torch.testing.assert_close(small(X), run.model.eval()(X), rtol=0.1, atol=0.1)
    run.model.train()
    yield


CHEAP: list[Tool] = [
    memory,
    copies,
    saved,
    safetensors,
    forked,
    loaded,
    converted,
    swapped,
    shared_with_processes,
]
# These depend on how a way notices passes only.
COSTLY: list[Tool] = [scripted, exported, compiled, quantized, spawned]
WAYS = [*ENTRIES, "async", "hook"]
BY_HOW_THEY_NOTICE = ("awc", "atc", "gradient", "put", "wrapper", "hook")


def trained(kind: str, tools: list[Tool], folder: Path) -> tuple[Tensor, list[str]]:
    """Returns the parameters after training with some tools, or with none of them, and what failed."""
    wrong: list[str] = []
    run = Run(kind)
    run.train()
    for tool in tools:
        try:
            using = tool(run, folder)
            next(using)
            run.train()
            next(using, None)
        except Exception:
            wrong.append(f"{tool.__name__}: {traceback.format_exc()}")
            break
    result = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    run.end()
    return result, wrong


def nothing(run: Run, folder: Path) -> Iterator[None]:
    yield


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, kind=WAYS)
def test_tools(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    tools = [*CHEAP, *(COSTLY if kind in BY_HOW_THEY_NOTICE else [])]
    got, wrong = trained(kind, tools, folder)
    assert not wrong, "\n".join(wrong)
    if kind != "async":  # its averages depend on the speeds of the ranks
        want, _ = trained(kind, [nothing] * len(tools), folder)
        same(got, want)


@pytest.mark.parametrize(
    ("kind", "reentrant"),
    [
        (kind, reentrant)
        for kind in WAYS
        for reentrant in (False, True)
        # DDP itself does not take it; "cta" has to see the pass, which has no gradients if it is reentrant
        if kind not in (*IN_STEP, "async", "hook") and not (kind == "cta" and reentrant)
    ],
)
@on_ranks(2)
def test_a_pass_that_checkpointing_repeats_counts_once(kind: str, reentrant: bool) -> None:
    results = []
    for repeats in (False, True):
        interval = "num_steps_per_communication" if kind in (*BLUEFOGS, *WINDOWS) else "local_steps"
        run = Run(kind, **({} if kind == "wrapper" else {interval: 2}))
        call = partial(checkpoint, run.called, use_reentrant=reentrant) if repeats else None
        for _ in range(5):
            run.train(call)
        results.append(nn.utils.parameters_to_vector(run.model.parameters()).detach())
        run.end()
    same(*results)


@on_ranks(2, kind=["awc", "atc", "gradient", "put", "GradientTracking", "wrapper"])
def test_parameters_that_are_assigned(kind: str) -> None:
    """As with any optimizer, that of the earlier parameters does not train the new ones; the wrapper says so."""
    run = Run(kind)
    run.train()
    state = values(make_net(9))
    run.model.load_state_dict(state, assign=True)
    same(run.model.state_dict(), state)
    assert run.model.c.weight.data_ptr() == state["c.weight"].data_ptr()
    if kind == "wrapper":
        with pytest.raises(RuntimeError, match="'a.weight'.* must stay"):
            run.train()
    else:
        run.train()
        same(run.model.state_dict(), state)
    run.end()


@pytest.mark.parametrize("kind", [kind for kind in WAYS if kind != "async"])
@on_ranks(2)
def test_a_scripted_model_trains_as_the_model_does(kind: str) -> None:
    results = []
    for make in (make_net, lambda seed: torch.jit.script(make_net(seed))):
        run = Run(kind, make)
        for _ in range(3):
            run.train()
        results.append(values(run.model))
        run.end()
    same(*results)

"""Where the parameters of distributed optimizers live, when they are sent, and what may happen to them meanwhile."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import fogdist
import pytest
import torch
from fogdist import topology as topologies
from fogdist.context import handles
from harness import BACKEND
from reference import Checks, mix
from test_optimizers import FACTORIES, batch, loss_of, make_net, snapshot
from torch import Tensor, nn

from fog_pg import _C

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="fog's own optimizers")

EXACT = {"rtol": 1e-11, "atol": 1e-12}
COMBINING = ["awc", "atc"]
Change = Callable[[nn.Module, int], None]


def distribute(kind: str, model: nn.Module, **options: Any) -> Any:
    return FACTORIES[kind](torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **options)


def simulate(
    kind: str, models: list[nn.Module], steps: int, change: Change | None = None, loss: Any = loss_of
) -> list[Tensor]:
    """Trains all models in this process; `change` is made to each before each step's forward pass."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    matrix = topologies.mixing_matrix(topologies.uniform_weights(topologies.ExponentialGraph(len(models))))

    def combine() -> None:
        with torch.no_grad():
            for same in zip(*(m.parameters() for m in models)):
                if same[0].requires_grad:
                    for parameter, value in zip(same, mix([p.detach().clone() for p in same], matrix)):
                        parameter.copy_(value)

    for step in range(steps):
        for rank, model in enumerate(models):
            if change is not None:
                change(model, step)
            optimizers[rank].zero_grad()
            loss(model, rank, step).backward()
        if kind == "awc":
            combine()
        for optimizer in optimizers:
            optimizer.step()
        if kind == "atc":
            combine()
    return [snapshot(model) for model in models]


# --- memory -------------------------------------------------------------------------------------------------


def small_buckets(kind: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model = make_net(rank)
    optimizer = distribute(kind, model, bucket_cap_mb=1e-4)
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind != "gradient":
        assert all(_C.is_shared(p) for p in trained)
        assert not any(_C.is_shared(p) for p in model.frozen.parameters())
        assert len({p.untyped_storage().data_ptr() for p in trained}) > 4
    places = [p.data_ptr() for p in model.parameters()]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert places == [p.data_ptr() for p in model.parameters()]
    if kind != "gradient":
        expected = simulate(kind, [make_net(r) for r in range(size)], 4)[rank]
        torch.testing.assert_close(snapshot(model), expected, **EXACT)


@pytest.mark.parametrize("kind", FACTORIES)
def test_small_buckets(worlds, kind):
    worlds(3).run(small_buckets, kind)


def set_data(model: nn.Module, step: int) -> None:
    if step in (1, 3):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    if step == 2:
        model.encoder.weight.data = model.encoder.weight.data.t().contiguous().t()


def set_by_vector(model: nn.Module, step: int) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


def load_state(model: nn.Module, step: int) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=False)


CHANGES: dict[str, Change] = {"data": set_data, "vector": set_by_vector, "state dict": load_state}


def replaced_memory(kind: str, change: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model = make_net(rank)
    optimizer = distribute(kind, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            CHANGES[change](model, step)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    expected = simulate(kind, [make_net(r) for r in range(size)], 5, CHANGES[change])[rank]
    torch.testing.assert_close(snapshot(model), expected, **EXACT)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", COMBINING)
def test_parameters_that_get_other_values_or_memory(worlds, kind, change):
    worlds(3).run(replaced_memory, kind, change)


def converted(kind: str) -> None:
    fogdist.init()
    model = make_net(fogdist.rank())
    optimizer = distribute(kind, model)
    model.float()
    x, y = (t.float() for t in batch(0, 0))
    with pytest.raises(ValueError, match=r"'position' must stay torch.float64.*Convert a model before"):
        (model(x) - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", COMBINING)
def test_a_model_that_is_converted_later(worlds, kind):
    worlds(2).run(converted, kind)


# --- the same on all ranks ----------------------------------------------------------------------------------


def other_layouts(kind: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    with Checks() as checks:
        wider = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + (rank == 1)))
        with pytest.raises(ValueError, match=r"model must be the same on all ranks") as caught:
            distribute(kind, wider)
        checks.true("named", "'1.weight'" in str(caught.value) and "'0.weight'" not in str(caught.value))

        # Equally long, so that averages would go through.
        model = make_net(rank)
        other = [model.position, *model.encoder.parameters(), *model.head.parameters()]
        if rank == 1:
            other[0], other[2] = other[2], other[0]
        with pytest.raises(ValueError, match=r"(?s)model must be the same.*'encoder.bias'.*'position'"):
            FACTORIES[kind](torch.optim.SGD(other, lr=0.1), model)

        model = make_net(rank)
        optimizer = distribute(kind, model)
        optimizer.step()
        before = snapshot(model)
        (model.frozen.bias if rank == 0 else model.position).requires_grad_(rank == 0)
        with pytest.raises(ValueError, match=r"(?s)model must be the same.*position"):
            optimizer.step()
        checks.true("not averaged", torch.equal(snapshot(model), before))


@pytest.mark.parametrize("kind", FACTORIES)
def test_ranks_with_other_parameters(worlds, kind):
    worlds(2).run(other_layouts, kind)


def overlapping_parameters(kind: str) -> None:
    fogdist.init()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match="'0.weight' and '1.weight' must not overlap.*Tied parameters"):
        distribute(kind, model)


@pytest.mark.parametrize("kind", COMBINING)
def test_parameters_that_overlap(worlds, kind):
    worlds(2).run(overlapping_parameters, kind)


def make_owner(kind: str, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "wrapper":
        return fogdist.DecentralizedDataParallel(model, optimizer)
    if kind == "algorithm":
        return fogdist.algorithms.ExactDiffusion(optimizer, model)
    if kind == "win_put":
        return fogdist.DistributedWinPutOptimizer(optimizer, model)
    return FACTORIES[kind](optimizer, model)


OWNERS = ["awc", "atc", "win_put", "algorithm", "wrapper"]


def second_owner(kind: str) -> None:
    fogdist.init(lambda size: topologies.FullyConnectedGraph(size))
    model = make_net(0)
    first = make_owner(kind, model)
    for other in OWNERS:
        before = snapshot(model)
        with pytest.raises(ValueError, match="'position' must belong to one distributed optimizer"):
            make_owner(other, model)
        assert torch.equal(snapshot(model), before)
    # Others may have it after the first, even if that was in a cycle.
    cycle = [first]
    cycle.append(cycle)
    if kind == "win_put":
        first.unregister_window()
        kept = first
    else:
        kept = None
    del first, cycle
    for other in OWNERS:
        second = make_owner(other, model)
        if other == "win_put":
            second.unregister_window()
        del second
    assert kept is None or not kept.is_in_round
    # A copy of the model is another one.
    first = make_owner(kind, model)
    second = make_owner("atc", copy.deepcopy(model))
    if kind == "win_put":
        first.unregister_window()
    del first, second


@pytest.mark.parametrize("kind", OWNERS)
def test_a_model_has_one_owner(worlds, kind):
    worlds(2).run(second_owner, kind)


def grown(kind: str) -> None:
    """A head that the model did not have when its optimizer was distributed."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()

    models = [make_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])
    optimizer = distribute(kind, model)
    bases = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for r, (each, base) in enumerate([*zip(models, bases), (model, optimizer)]):
        each.extra = nn.Parameter(
            torch.full((3,), float(r if each is not model else rank), dtype=torch.float64)
        )
        base.add_param_group({"params": [each.extra], "lr": 0.3})
    matrix = topologies.mixing_matrix(topologies.uniform_weights(topologies.ExponentialGraph(size)))

    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return loss_of(model, r, step) + (model.extra * (r + 1)).square().sum()

    def combine() -> None:
        with torch.no_grad():
            for same in zip(*(m.parameters() for m in models)):
                if same[0].requires_grad:
                    for parameter, value in zip(same, mix([p.detach().clone() for p in same], matrix)):
                        parameter.copy_(value)

    for step in range(3):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        for r, each in enumerate(models):
            bases[r].zero_grad()
            loss(each, r, step).backward()
        if kind == "gradient":
            for same in zip(*(m.parameters() for m in models)):
                if same[0].grad is not None:
                    mean = torch.stack([p.grad for p in same]).mean(0)
                    for p in same:
                        p.grad = mean.clone()
        if kind == "awc":
            combine()
        for base in bases:
            base.step()
        if kind == "atc":
            combine()
    torch.testing.assert_close(snapshot(model), snapshot(models[rank]), **EXACT)


@pytest.mark.parametrize("kind", FACTORIES)
def test_parameters_that_the_model_gets_later(worlds, kind):
    worlds(3).run(grown, kind)


class Large(nn.Module):
    """Of layers that cost more to copy than to move."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(200, 200, bias=False)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def large_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return model(torch.randn(3, 200, dtype=torch.float64, generator=generator)).square().mean()


def average_without_copy(kind: str) -> None:
    """The average's memory becomes the parameters'; a state dict in hand stays what the parameters are."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    model = Large(rank)
    expected = [Large(r) for r in range(size)]
    optimizer: Any
    module: nn.Module = model
    if kind == "ddp_sync":
        module = fogdist.DecentralizedDataParallel(
            model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), broadcast=False
        )
        optimizer = module.optimizer
    else:
        optimizer = distribute(kind, model)
    held: dict[str, Tensor] = {}
    for step in range(6):
        if step == 3:
            held = dict(model.state_dict())
        before = [p.data_ptr() for p in model.parameters()]
        optimizer.zero_grad()
        large_loss(module, rank, step).backward()
        optimizer.step()
        after = [p.data_ptr() for p in model.parameters()]
        assert (before == after) is (step >= 3), step
        for name, value in held.items():
            assert torch.equal(value, model.get_parameter(name))
    kind = "atc" if kind == "atc" else "awc"  # which is what the wrapper does
    torch.testing.assert_close(snapshot(model), simulate(kind, expected, 6, loss=large_loss)[rank], **EXACT)


@pytest.mark.parametrize("kind", [*COMBINING, "ddp_sync"])
def test_an_average_is_not_copied(worlds, kind):
    worlds(3).run(average_without_copy, kind)


# --- when it is sent ----------------------------------------------------------------------------------------


class Watching(nn.Module):
    """Calls a function in its forward pass and in its backward pass."""

    def __init__(self, limit: float | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.words = nn.Embedding(5, 3, max_norm=limit).double()
        self.watch: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.watch()
        return self.layer(x) + self.words(torch.arange(5))


def average_with_forward() -> None:
    """Rank 0 gets the average of parameters within its forward pass, in which the others still are."""
    fogdist.init()
    rank = fogdist.rank()
    torch.manual_seed(rank)
    model = Watching()
    optimizer = distribute("awc", model)
    seen: list[bool] = []

    def watch() -> None:
        fogdist.barrier()
        before = snapshot(model)
        if rank == 0:
            assert optimizer.is_in_round
            (operation,) = handles()._in_flight.values()
            while not operation.work.is_completed():
                pass
            seen.append(True)
        fogdist.barrier()
        assert torch.equal(snapshot(model), before)  # it is not written before step()

    model.watch = watch
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    assert seen == [True] * 3 * (rank == 0)
    model.watch = lambda: None


def test_awc_averages_during_the_forward_pass(worlds):
    worlds(3).run(average_with_forward)


def embeddings_with_a_limit(kind: str) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    models = []
    for r in range(size):
        torch.manual_seed(r)
        models.append(Watching(0.8))
    model = copy.deepcopy(models[rank])
    optimizer = distribute(kind, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
    torch.testing.assert_close(snapshot(model), simulate(kind, models, 4)[rank], **EXACT)


@pytest.mark.parametrize("kind", COMBINING)
def test_a_forward_pass_that_changes_parameters(worlds, kind):
    worlds(3).run(embeddings_with_a_limit, kind)


def changed_in_flight(how: str) -> list[str]:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = distribute("awc", model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step > 0:
                fogdist.barrier()
                if how == "in place":
                    with torch.no_grad():
                        model.head.weight.mul_(2)
                else:
                    model.head.weight.data = model.head.weight.data * 2
            optimizer.step()
            assert _C.is_shared(model.head.weight)
    expected = simulate("awc", [make_net(r) for r in range(fogdist.size())], 3)[rank]
    if how != "in place":  # there the neighbors may have seen either value
        torch.testing.assert_close(snapshot(model), expected, **EXACT)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("how", "which"), [("in place", "'head.weight'"), ("data", "a parameter")])
def test_parameters_changed_while_they_are_averaged_warn_once(worlds, how, which):
    for messages in worlds(2).run(changed_in_flight, how):
        assert len(messages) == 1
        assert messages[0].startswith(f"{which} was changed between the forward pass and step()")


def steps_in_backward() -> None:
    """The last layer is averaged before the backward pass reaches the first."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    models = [make_net(r) for r in range(size)]
    model = copy.deepcopy(models[rank])
    hidden: list[Tensor] = []
    model.encoder.register_forward_hook(lambda *given: hidden.append(given[-1]))
    optimizer = distribute("atc", model, step_in_backward=True, bucket_cap_mb=1e-4)
    expected = simulate("atc", models, 1)[rank]
    seen: list[int] = []

    def watch(_: Tensor) -> None:
        for handle in list(handles()._in_flight):
            while not fogdist.poll(handle):
                pass
            seen.append(handle)

    loss = loss_of(model, rank, 0)
    hidden[0].register_hook(watch)
    loss.backward()
    assert seen
    optimizer.step()
    torch.testing.assert_close(snapshot(model), expected, **EXACT)
    places = [[p.data_ptr() for p in group["params"]] for group in optimizer.param_groups]
    assert places == [[p.data_ptr() for p in model.parameters()]]


def test_atc_averages_during_the_backward_pass(worlds):
    worlds(3).run(steps_in_backward)


def gradients_changed_after_their_step(how: str) -> None:
    fogdist.init()
    rank = fogdist.rank()
    model = make_net(rank)
    optimizer = distribute("atc", model, step_in_backward=True, bucket_cap_mb=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    loss = loss_of(model, rank, 0)
    (scaler.scale(loss) if how == "scaler" else loss).backward()
    if how == "passes":
        with pytest.raises(RuntimeError, match="got more gradient after step_in_backward"):
            loss_of(model, rank, 1).backward()
    elif how == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif how == "zero_grad":
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"step_in_backward"):
        scaler.step(optimizer) if how == "scaler" else optimizer.step()
    # The error is over with that step.
    models = fogdist.allgather(snapshot(model)[None])
    nets = [copy.deepcopy(model) for _ in models]
    for net, values in zip(nets, models, strict=True):
        nn.utils.vector_to_parameters(values, net.parameters())
    optimizer._fog_wrapped.state.clear()  # momentum
    expected = simulate("atc", nets, 3)[rank]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    torch.testing.assert_close(snapshot(model), expected, **EXACT)


@pytest.mark.parametrize("how", ["passes", "clipping", "zero_grad", "scaler"])
def test_gradients_changed_after_their_step(worlds, how):
    worlds(2).run(gradients_changed_after_their_step, how)

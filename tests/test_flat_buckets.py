"""Tests of tensors as views of flat buffers: values, identity, training, checkpoints, and replaced memory."""

from __future__ import annotations

import copy
import io

import fogdist
import pytest
import torch
from fogdist.packing import make_buckets
from fogdist.training.buckets import ALIGNMENT, FlatBuckets
from torch import Tensor, nn
from torch.distributed import checkpoint

from fog_pg import _C


class Net(nn.Module):
    """A model with parameters that are tied, frozen, unused, channels_last, of several dtypes, scalar, or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).double().requires_grad_(False)
        self.unused = nn.Linear(2, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.to(memory_format=torch.channels_last)).mean((1, 2))
        return self.scale * self.frozen(self.second(self.first(x)).double()).float()


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(number: int) -> Tensor:
    return torch.randn(4, 3, 6, 7, generator=torch.Generator().manual_seed(number))


def check_views(flats: FlatBuckets) -> None:
    """Checks that each tensor is in its place, and that there are only zeros between them."""
    for bucket, flat in enumerate(flats.flats):
        assert flat.dim() == 1 and flat.data_ptr() % ALIGNMENT == 0
        rest = flat.clone()
        for view in flats.views(rest, bucket):
            view.zero_()
        assert not rest.any()
        for tensor, view in zip(flats.tensors_of(bucket), flats.views(flat, bucket), strict=True):
            assert flats.bucket_of(tensor) == bucket
            assert tensor.data_ptr() == view.data_ptr() and tensor.data_ptr() % ALIGNMENT == 0
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (view.dtype, view.shape, view.stride())


@pytest.mark.parametrize("max_bytes", [1, 300, 8 << 20])
def test_tensors_are_views_with_their_values(max_bytes: int) -> None:
    model, reference = make_net(), make_net()
    parameters = list(model.parameters())
    model.scale.grad = torch.tensor(2.0)
    flats = FlatBuckets([*parameters, model.second.weight], max_bytes)
    check_views(flats)
    assert list(model.parameters()) == parameters and model.second.weight is model.first.weight
    assert flats.tensors == parameters
    assert model.scale.grad == 2.0
    for parameter, expected in zip(parameters, reference.parameters(), strict=True):
        assert torch.equal(parameter, expected) and parameter.stride() == expected.stride()
        assert parameter.requires_grad == expected.requires_grad and parameter.is_leaf
    assert all(_C.is_shared(flat) for flat in flats.flats if flat.numel() > 0)
    sizes = [flat.numel() * flat.element_size() for flat in flats.flats]
    # A bucket is within the limit, or has only one tensor.
    assert all(
        size <= max_bytes or len([t for t in flats.tensors_of(i) if t.numel()]) <= 1
        for i, size in enumerate(sizes)
    )
    if max_bytes == 8 << 20:
        assert [flat.dtype for flat in flats.flats] == [torch.float32, torch.float64]


def test_it_works_both_ways() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()))
    with torch.no_grad():
        flats.flats[0].mul_(2)
        expected = make_net()
        for parameter in expected.parameters():
            if parameter.dtype == torch.float32:
                parameter.mul_(2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    nn.init.constant_(model.unused.bias, 7.0)
    place = [t is model.unused.bias for t in flats.tensors_of(0)].index(True)
    assert flats.views(flats.flats[0], 0)[place].eq(7).all()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_the_same(kind: str) -> None:
    models = [make_net(), make_net()]
    flats = FlatBuckets(list(models[0].parameters()), max_bytes=600)
    optimizers = [OPTIMIZERS[kind]([p for p in m.parameters() if p.requires_grad]) for m in models]
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            optimizer.step()
    check_views(flats)
    assert not flats.reattach()
    for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, plain)


def test_views_of_another_buffer() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()), max_bytes=400)
    for bucket, flat in enumerate(flats.flats):
        shadow = torch.full((flat.numel() + 3,), 5.0, dtype=torch.float16)[3:]
        for tensor, view in zip(flats.tensors_of(bucket), flats.views(shadow, bucket), strict=True):
            assert view.shape == tensor.shape and view.stride() == tensor.stride()
            view.copy_(tensor.detach())
        for tensor, view in zip(flats.tensors_of(bucket), flats.views(shadow, bucket), strict=True):
            assert torch.equal(view, tensor.half())
    with pytest.raises(ValueError, match=r"flat_like must be contiguous of shape"):
        flats.views(torch.zeros(3), 0)
    with pytest.raises(ValueError, match="strides"):
        flats.views(torch.zeros(2 * flats.flats[0].numel())[::2], 0)


def test_layouts_tell_models_apart() -> None:
    model = make_net()
    layout = FlatBuckets(list(model.parameters())).layout()
    assert layout == FlatBuckets(list(make_net().parameters())).layout()
    other = make_net()
    other.conv.to(memory_format=torch.contiguous_format)
    assert layout != FlatBuckets(list(other.parameters())).layout()


# --- copies and checkpoints ---------------------------------------------------------------------------------


def test_a_copy_of_the_model_is_independent() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for flat in flats.flats:
            flat.add_(1)
    expected = make_net()
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), expected.parameters(), strict=True))
    assert twin.second.weight is twin.first.weight


def test_state_dicts() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    raw = sum(flat.numel() * flat.element_size() for flat in flats.flats)
    assert len(buffer.getvalue()) < raw + 20_000  # each buffer is saved once, not once per tensor
    buffer.seek(0)
    plain = Net()
    plain.load_state_dict(torch.load(buffer))
    reference = make_net()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), reference.parameters(), strict=True))
    # Values can also be loaded into views, which stay in place.
    other = Net()
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.load_state_dict(state)
    check_views(flats)
    assert not flats.reattach()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    # Here torch replaces the parameters themselves, so the distributed ones no longer belong to the model.
    model.load_state_dict(state, assign=True)
    assert not flats.reattach() and flats.tensors[0] is not model.conv.weight


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path) -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()))
    with torch.no_grad():
        flats.flats[0].mul_(3)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    with torch.no_grad():
        flats.flats[0].zero_()
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    model.load_state_dict(state)
    check_views(flats)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


# --- replaced memory ----------------------------------------------------------------------------------------


def test_replaced_data_comes_back() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()), max_bytes=600)
    pointers = [flat.data_ptr() for flat in flats.flats]

    model.scale.data = torch.tensor(9.0)
    assert flats.reattach() and not flats.reattach()
    assert model.scale.item() == 9.0

    nn.utils.vector_to_parameters(torch.arange(9.0), model.unused.parameters())
    assert flats.reattach()
    check_views(flats)
    assert torch.equal(model.unused.weight.flatten(), torch.arange(6.0))
    assert model.unused.bias.tolist() == [6.0, 7.0, 8.0]
    assert [flat.data_ptr() for flat in flats.flats] == pointers


def test_replaced_data_in_other_layouts() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()))
    value = model.conv.weight.detach().clone()
    model.to(memory_format=torch.contiguous_format)
    assert flats.reattach()
    assert torch.equal(model.conv.weight, value)
    check_views(flats)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    # The same address with other strides, and tensors that swap their places.
    model.first.weight.data = model.first.weight.data.t()
    expected = model.first.weight.detach().clone()
    biases = model.first.bias.detach().clone(), model.second.bias.detach().clone()
    model.first.bias.data, model.second.bias.data = model.second.bias.data, model.first.bias.data
    assert flats.reattach()
    assert torch.equal(model.first.weight, expected)
    assert torch.equal(model.second.bias, biases[0]) and torch.equal(model.first.bias, biases[1])
    check_views(flats)


def test_converted_tensors_are_refused_by_name() -> None:
    model = make_net()
    names, parameters = zip(*model.named_parameters(), strict=True)
    flats = FlatBuckets(parameters, names=names)
    model.unused.double()
    with pytest.raises(ValueError, match=r"'unused.weight' must stay torch.float32 .* got torch.float64"):
        flats.reattach()
    model.unused.float()
    assert flats.reattach()
    model.scale.data = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'scale' must stay .*shape \(\)"):
        flats.reattach()


# --- wrong arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad, error, message",
    [
        (lambda: "x", TypeError, r"tensors\[1\] must be a torch.Tensor, got str"),
        (lambda: torch.eye(3).to_sparse(), TypeError, r"tensors\[1\] must be dense .*sparse_coo"),
        (lambda: torch.empty(3, device="meta"), ValueError, r"tensors\[1\] must have memory"),
        (lambda: torch.zeros(3, 1).expand(3, 4), ValueError, r"tensors\[1\] must not be expanded"),
        (lambda: nn.LazyLinear(3).weight, ValueError, r"tensors\[1\] must have a shape, got a Uninit"),
    ],
    ids=["string", "sparse", "meta", "expanded", "lazy"],
)
def test_refused(bad, error, message) -> None:
    good = torch.arange(3.0)
    address = good.data_ptr()
    with pytest.raises(error, match=message):
        FlatBuckets([good, bad()])
    assert good.data_ptr() == address  # nothing was changed


def test_overlapping_tensors_are_refused() -> None:
    whole = torch.arange(10.0)
    with pytest.raises(ValueError, match="'tail' and 'head' must not overlap|'head' and 'tail' must not"):
        FlatBuckets([whole[4:], whole[:5]], names=["tail", "head"])
    flats = FlatBuckets([whole[5:], whole[:5]])
    assert flats.tensors[0].tolist() == [5, 6, 7, 8, 9]
    assert whole.tolist() == list(range(10))  # the given tensor keeps its own memory


def test_arguments() -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        FlatBuckets([torch.zeros(1)], 0)
    with pytest.raises(ValueError, match="names must be as many as tensors, 1, got 2"):
        FlatBuckets([torch.zeros(1)], names=["a", "b"])
    assert FlatBuckets([]).flats == []
    with pytest.raises(ValueError, match="one of the buckets'"):
        FlatBuckets([torch.zeros(1)]).bucket_of(torch.zeros(1))


def test_alignment_counts_in_buckets() -> None:
    tensors = [torch.zeros(1) for _ in range(10)]
    assert [len(bucket.places) for bucket in make_buckets(tensors, 128, 64)] == [2] * 5
    assert len(FlatBuckets(tensors, 128).flats) == 5
    # Sparse strides become dense; each dtype has its own buffer.
    column = torch.arange(12.0).view(4, 3)[:, 1]
    flats = FlatBuckets([column, torch.tensor([1 + 2j]), torch.tensor([True, False])])
    assert column.stride() == (1,) and column.tolist() == [1, 4, 7, 10]
    assert [flat.dtype for flat in flats.flats] == [torch.float32, torch.complex64, torch.bool]


# --- other memory -------------------------------------------------------------------------------------------


def large(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300, bias=False))


def next_values(flats: FlatBuckets, add: float) -> Tensor:
    """Returns a buffer in shared memory with other values in each tensor's place."""
    flat = flats.flats[0]
    buffer = fogdist.empty(flat.numel()).zero_()
    for view, now in zip(flats.views(buffer, 0), flats.views(flat, 0), strict=True):
        view.copy_(now + add)
    return buffer


def test_swap_gives_tensors_another_memory() -> None:
    model, reference = large(), large()
    flats = FlatBuckets(list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for net, steps in ((model, optimizer), (reference, expected)):
            steps.zero_grad()
            net(torch.ones(2, 300)).square().sum().backward()
        buffer = next_values(flats, 0.5)
        assert flats.swap(0, buffer), step
        assert flats.flats[0] is buffer
        check_views(flats)
        assert not flats.reattach()  # the tensors are in their places
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.5)
        optimizer.step()
        expected.step()
    for parameter, value in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.is_leaf and torch.equal(parameter, value)


@pytest.mark.parametrize("what", ["state dict", "array", "view", "graph", "buffer"])
def test_memory_that_others_are_in_is_not_swapped(what: str) -> None:
    model = large()
    flats = FlatBuckets(list(model.parameters()))
    weight = model[0].weight
    held = {
        "state dict": lambda: model.state_dict(),
        "array": lambda: weight.detach().numpy(),
        "view": lambda: weight.data[3:5],
        "graph": lambda: model(torch.ones(2, 300, requires_grad=True)),
        "buffer": lambda: flats.flats[0][:7],
    }[what]()
    addresses = [p.data_ptr() for p in model.parameters()]
    assert not flats.swap(0, next_values(flats, 0.5))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    check_views(flats)
    del held
    assert flats.swap(0, next_values(flats, 0.5))


def test_swaps_that_do_not_pay_or_cannot_be() -> None:
    small = nn.Linear(20, 20)
    flats = FlatBuckets(list(small.parameters()))
    assert not flats.swap(0, next_values(flats, 1.0))  # a swap would cost more than a copy
    model = large()
    flats = FlatBuckets(list(model.parameters()))
    flat = flats.flats[0]
    assert not flats.swap(0, torch.empty_like(flat))  # exchanges would have to copy this buffer
    assert not flats.swap(0, fogdist.empty(2 * flat.numel())[flat.numel() :])
    with pytest.raises(ValueError, match="flat_like must be contiguous of shape"):
        flats.swap(0, fogdist.empty(flat.numel() + 1))
    # One parameter is elsewhere and the buffer has one more view, so the number of tensors is as usual.
    alias = model[1].weight.data
    model[0].weight.data = model[0].weight.data.clone()
    assert not flats.swap(0, next_values(flats, 1.0))
    assert alias.data_ptr() == model[1].weight.data_ptr()

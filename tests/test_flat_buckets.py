"""Tests of flat buffers with the values of tensors: contents, layout, both directions, and what is refused."""

from __future__ import annotations

import pytest
import torch
from fogdist.training.buckets import FlatBuckets
from torch import nn

from fog_pg import _C


class Net(nn.Module):
    """A model with parameters that are tied, frozen, channels_last, of several dtypes, scalar, or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(7, 7)
        self.second = nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(7, 7).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def check_contents(flats: FlatBuckets) -> None:
    """Checks that the buffers have the values of the tensors, one after the other, with their strides."""
    for bucket, flat in enumerate(flats.flats):
        pieces = list(flats.pieces(flats.flats))
        assert [tensor for tensor, _ in pieces] == [
            t for i in range(len(flats.flats)) for t in flats.tensors_of(i)
        ]
        assert flat.numel() == sum(tensor.numel() for tensor in flats.tensors_of(bucket))
        for tensor, view in zip(flats.tensors_of(bucket), flats.views(flat, bucket), strict=True):
            assert flats.bucket_of(tensor) == bucket
            assert torch.equal(tensor, view) and (tensor.dtype, tensor.stride()) == (
                view.dtype,
                view.stride(),
            )


@pytest.mark.parametrize("max_bytes", [1, 300, 8 << 20])
def test_buffers_are_copies(max_bytes: int) -> None:
    model, reference = make_net(), make_net()
    parameters = list(model.parameters())
    places = [p.data_ptr() for p in parameters]
    flats = FlatBuckets([*parameters, model.second.weight], max_bytes)
    check_contents(flats)
    assert flats.tensors == parameters and [p.data_ptr() for p in parameters] == places
    assert all(torch.equal(p, q) for p, q in zip(parameters, reference.parameters(), strict=True))
    assert all(_C.is_shared(flat) for flat in flats.flats if flat.numel() > 0)
    # A bucket is within the limit, or has only one tensor.
    for number, flat in enumerate(flats.flats):
        assert flat.nbytes <= max_bytes or len([t for t in flats.tensors_of(number) if t.numel()]) <= 1
    if max_bytes == 8 << 20:
        assert [flat.dtype for flat in flats.flats] == [torch.float32, torch.float64]


def test_values_go_both_ways() -> None:
    model = make_net()
    flats = FlatBuckets(list(model.parameters()), max_bytes=300)
    nn.init.constant_(model.first.bias, 7.0)
    model.scale.data = torch.tensor(9.0)
    flats.load()
    check_contents(flats)
    for vector in flats.values():
        vector.add_(1)
    version = model.scale._version
    flats.write_changes()
    check_contents(flats)
    assert model.scale.item() == 10.0 and model.first.bias.eq(8).all()
    assert model.scale._version > version  # autograd notices
    averages = {
        number: torch.full_like(flat, number) for number, flat in enumerate(flats.flats) if number > 0
    }
    flats.write_back(averages)
    for number, tensors in enumerate(map(flats.tensors_of, range(len(flats.flats)))):
        assert all(bool(tensor.eq(number).all()) == (number > 0) for tensor in tensors if tensor.numel())


def test_copies_are_made_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(3.0)
    flats = FlatBuckets([tensor])
    copies: list[str] = []
    load, write_back = flats.load, flats.write_back
    monkeypatch.setattr(flats, "load", lambda *given: copies.append("load") or load(*given))
    monkeypatch.setattr(flats, "write_back", lambda *given: copies.append("write_back") or write_back(*given))
    flats.write_changes()
    flats.values()
    assert not copies  # nothing has changed
    flats.outdate()
    flats.write_changes()  # the tensors' values count, not those of the buffers
    assert flats.copies()[0].tolist() == [0, 1, 2] and copies == ["load"]
    flats.values()[0].fill_(5)
    flats.write_changes()
    flats.write_changes()
    assert copies == ["load", "write_back"] and tensor.tolist() == [5, 5, 5]
    flats.write_back({0: torch.zeros(3)})
    assert flats.values()[0].tolist() == [0, 0, 0]


def test_shared_tensors_are_views() -> None:
    own, (one, other) = torch.arange(3.0), torch.arange(4.0).split(2)
    processes = torch.arange(2.0).share_memory_()
    flats = FlatBuckets([own, one, other, processes], share=True)
    assert [_C.is_shared(tensor) for tensor in (own, one, other, processes)] == [True, False, False, False]
    flats.flats[0].add_(1)
    assert own.tolist() == [1, 2, 3] and other.tolist() == [2, 3]
    flats.write_back()
    assert other.tolist() == [3, 4] and processes.tolist() == [1, 2] and processes.is_shared()
    own.data = torch.zeros(3)  # from now on values are copied
    flats.load()
    assert flats.flats[0][:3].tolist() == [0, 0, 0]


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
        flats.views(torch.zeros(2 * flats.flats[-1].numel())[::2], len(flats.flats) - 1)


def test_layouts_tell_models_apart() -> None:
    layout = FlatBuckets(list(make_net().parameters())).layout()
    assert layout == FlatBuckets(list(make_net().parameters())).layout()
    other = make_net()
    other.conv.to(memory_format=torch.contiguous_format)
    assert layout != FlatBuckets(list(other.parameters())).layout()


def test_sparse_strides_and_dtypes() -> None:
    """Sparse strides become dense in the buffers; each dtype has its own one."""
    column = torch.arange(12.0).view(4, 3)[:, 1]
    flats = FlatBuckets([column, torch.tensor([1 + 2j]), torch.tensor([True, False])])
    assert [flat.dtype for flat in flats.flats] == [torch.float32, torch.complex64, torch.bool]
    assert flats.flats[0].tolist() == [1, 4, 7, 10]
    flats.write_back({0: torch.zeros(4)})
    assert column.tolist() == [0] * 4 and column.stride() == (3,)


# --- wrong arguments ----------------------------------------------------------------------------------------


def test_converted_tensors_are_refused_by_name() -> None:
    model = make_net()
    names, parameters = zip(*model.named_parameters(), strict=True)
    flats = FlatBuckets(parameters, names=names)
    model.first.double()
    with pytest.raises(ValueError, match=r"'first.weight' must stay torch.float32 .* got torch.float64"):
        flats.load()
    model.first.float()
    flats.load()
    model.scale.data = torch.zeros(2)
    with pytest.raises(ValueError, match=r"'scale' must stay .*shape \(\)"):
        flats.load()


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
    with pytest.raises(error, match=message):
        FlatBuckets([torch.arange(3.0), bad()])


def test_arguments() -> None:
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        FlatBuckets([torch.zeros(1)], 0)
    with pytest.raises(ValueError, match="names must be as many as tensors, 1, got 2"):
        FlatBuckets([torch.zeros(1)], names=["a", "b"])
    assert FlatBuckets([]).flats == []
    with pytest.raises(ValueError, match="one of the buckets'"):
        FlatBuckets([torch.zeros(1)]).bucket_of(torch.zeros(1))

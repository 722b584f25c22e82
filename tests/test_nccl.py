"""Tests how fog asks torch for an NCCL backend, with and without torch's registry of its own backends.

NCCL itself is not needed: a fake torch.distributed records the calls.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fog_pg import _nccl

MINUTE = timedelta(minutes=1)
OPTIONS = SimpleNamespace(_timeout=MINUTE, group_name="7", global_ranks_in_group=[1, 3])
DEVICE = torch.device("cuda", 1)


class Options:
    """ProcessGroupNCCL.Options up to torch 2.14."""


class LazyOptions(Options):
    """ProcessGroupNCCL.Options of torch 2.15."""

    lazy_init = False


class Distributed:
    """The part of torch.distributed that fog uses."""

    def __init__(self, options: type[Options], registered: list[str] | None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.made = SimpleNamespace(_set_sequence_number_for_group=lambda: self.asked.append(("sequence",)))
        self.ProcessGroupNCCL = self._process_group
        self._process_group.__func__.Options = options  # type: ignore[attr-defined]
        self.Backend = SimpleNamespace(_plugins={})
        if registered is not None:
            self.Backend._ensure_backend_registered = lambda name: self._register(name, registered)

    def _process_group(self, *arguments: Any) -> Any:
        self.asked.append(("ProcessGroupNCCL", *arguments))
        return self.made

    def _register(self, name: str, known: list[str]) -> None:
        if name in known:

            def create(*arguments: Any) -> Any:
                self.asked.append((name, *arguments))
                return self.made

            self.Backend._plugins[name.upper()] = SimpleNamespace(creator_fn=create, extended_api=True)

    def is_nccl_available(self) -> bool:
        return True

    def PrefixStore(self, prefix: str, store: Any) -> tuple[str, Any]:
        return (prefix, store)


def ask(
    monkeypatch: pytest.MonkeyPatch, fake: Distributed, *, eager: bool, given: SimpleNamespace = OPTIONS
) -> list[tuple[Any, ...]]:
    for name in ("ProcessGroupNCCL", "Backend", "is_nccl_available", "PrefixStore"):
        monkeypatch.setattr(dist, name, getattr(fake, name), raising=False)
    assert _nccl.create("store", 1, 2, given, DEVICE, eager) is fake.made  # type: ignore[arg-type]
    return fake.asked


@pytest.mark.parametrize("eager", [False, True])
def test_earlier_torch_makes_it_by_its_class(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    (name, store, rank, size, options), sequence = ask(monkeypatch, Distributed(Options, None), eager=eager)
    assert (name, store, rank, size) == ("ProcessGroupNCCL", ("fog.cuda", "store"), 1, 2)
    assert vars(options) == {
        "_timeout": MINUTE,
        "global_ranks_in_group": [1, 3],
        "group_name": "7",
        "is_high_priority_stream": False,
    }
    assert sequence == ("sequence",)


def test_the_default_group_has_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    default = SimpleNamespace(_timeout=MINUTE, group_name="0", global_ranks_in_group=[])
    (_, _, _, _, options), _ = ask(monkeypatch, Distributed(Options, None), eager=True, given=default)
    assert options.global_ranks_in_group == [0, 1]
    ((_, arguments, _),) = ask(monkeypatch, Distributed(LazyOptions, ["nccl"]), eager=True, given=default)
    assert arguments.global_ranks_in_group == [0, 1]


@pytest.mark.parametrize(
    ("kind", "eager", "registered", "legacy", "name", "lazy"),
    [
        (LazyOptions, False, ["nccl", "nccl-lazy"], False, "nccl-lazy", True),
        (LazyOptions, False, ["nccl", "nccl-lazy"], True, "nccl", True),
        (LazyOptions, False, ["nccl"], False, "nccl", True),
        (LazyOptions, True, ["nccl", "nccl-lazy"], False, "nccl", False),
        (Options, False, ["nccl", "nccl-lazy"], False, "nccl", None),
    ],
)
def test_later_torch_makes_it_by_its_registry(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Options],
    eager: bool,
    registered: list[str],
    legacy: bool,
    name: str,
    lazy: bool | None,
) -> None:
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", "0" if legacy else "1")
    ((asked, arguments, options),) = ask(monkeypatch, Distributed(kind, registered), eager=eager)
    assert asked == name
    assert vars(arguments) == {
        "store": ("fog.cuda", "store"),
        "group_rank": 1,
        "group_size": 2,
        "timeout": MINUTE,
        "group_id": "7",
        "global_ranks_in_group": [1, 3],
        "split_from": None,
        "enable_reconfigure": False,
        "process_group": SimpleNamespace(bound_device_id=DEVICE),
    }
    assert getattr(options, "lazy_init", None) is lazy
    assert options._timeout == MINUTE


def test_torch_without_nccl_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA tensors need a torch with NCCL"):
        _nccl.create("store", 0, 1, OPTIONS, DEVICE, False)  # type: ignore[arg-type]

"""Tests of how a state travels to another process: whole and as it was, to one that knows the secret, or not at all."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import hashlib
import hmac
import io
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import fogdist
import numpy as np
import pytest
import torch
from fogdist import parameters
from fogdist.checkpoint import pieces
from fogdist.elastic import transfer
from fogdist.elastic.transfer import Offer, Source
from harness import WorldPool
from torch import nn
from torch.serialization import safe_globals

SOON = 20.0
STATE = {"one": {"values": torch.arange(300_000.0), "steps": 7, "names": ["a", "b"]}}


class Secret:
    """What a process knows: proofs of one transfer by one secret."""

    def __init__(self, secret: str, ticket: int = 1) -> None:
        self.key, self.ticket = secret.encode(), ticket

    def __call__(self, purpose: str, *parts: str) -> str:
        text = "\0".join((purpose, str(self.ticket), *parts))
        return hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def offer() -> Iterator[Offer]:
    made = Offer(STATE, [], Secret("right"))
    yield made
    made.close()
    until_over(made)


def until_over(offer: Offer) -> None:
    deadline = time.monotonic() + SOON
    while offer.is_wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_state_arrives_whole(offer: Offer) -> None:
    """As it was when it was offered; the rank sees the connection until the process closes it."""
    before = STATE["one"]["values"].clone()
    source = Source(offer.place, Secret("right"))
    state = source.read(timedelta.max.total_seconds())
    assert state is not None
    assert torch.equal(state["one"]["values"], before)
    assert (state["one"]["steps"], state["one"]["names"]) == (7, ["a", "b"])
    time.sleep(0.1)
    assert offer.is_wanted
    source.close()
    until_over(offer)


def test_a_rank_with_many_open_files_gives_its_state() -> None:
    """Regression: it waited for the process by select(), which knows no descriptors above 1,023."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    try:
        test_a_state_arrives_whole(Offer(STATE, [], Secret("right")))
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_tensors_may_change_after_the_offer() -> None:
    values = torch.ones(1000)
    offer = Offer({"values": values}, ["127.0.0.1"], Secret("right"))
    values.zero_()
    source = Source(offer.place, Secret("right"))
    state = source.read(SOON)
    assert state is not None and state["values"].eq(1).all()
    source.close()
    until_over(offer)


# --- what a state holds -------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: int


class Mood(enum.Enum):
    GOOD = "good"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Note:
    text: str
    values: Any = None


class Thing:
    """An ordinary class of a user's."""

    def __init__(self) -> None:
        self.value = 3


@dataclasses.dataclass
class Begun:
    """A class of values that begins something when it is called, as its copies are."""

    what: str

    def __post_init__(self) -> None:
        self.begun = True

    def __reduce__(self) -> tuple[Any, ...]:
        return Begun, (self.what,)


class Scaled(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.history: Any = {"amax": [torch.ones(2), 3.0], "recipe": Note("delayed", {Mood.GOOD: (1, 2)})}

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


def everything() -> dict[str, Any]:
    """Returns a state with all that a state dict may hold, the same in each call."""
    torch.manual_seed(3)
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # It gives the optimizer numbers of NumPy's.
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch * 1e-3))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert type(optimizer.param_groups[0]["lr"]) is np.float64
    wide = collections.OrderedDict(a=1)
    wide.attribute = [torch.ones(2)]  # type: ignore[attr-defined]
    dtypes = [torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int8]
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tensors": [torch.arange(4).to(dtype) for dtype in dtypes] + [torch.ones(()), torch.empty(0, 2)],
        "views": [torch.arange(6.0)[::2], torch.ones(2, 3).t()],
        "numbers": [True, 2**80, 1e300, float("inf"), 2j, None, "text", b"bytes", bytearray(b"more")],
        "torch": [
            torch.float16,
            torch.device("cpu"),
            torch.Size([2, 3]),
            torch.strided,
            torch.ones(3).max(0),
        ],
        "numpy": [np.float64(0.1), np.int32(3), np.bool_(True), np.str_("a"), np.arange(6).reshape(2, 3)],
        "dtypes": [np.dtype("f4"), int, Mood],
        "values": [Point(torch.ones(2), 3), Mood.GOOD, Level.HIGH, Note("a", [Point(1, 2)])],
        "bytes": io.BytesIO(b"abc"),
        "sets": [{1, 2}, frozenset({Mood.GOOD}), range(3), slice(1, None)],
        "dicts": [wide, collections.defaultdict(list, a=[torch.ones(1)]), collections.Counter("aab")],
        "keys": {Mood.GOOD: 1, np.int64(3): 2, (1, 2): 3, 4: 5, "fog object": 6},
        "lists": [collections.deque([1, torch.ones(2)], 5), ((), [[]], {})],
    }


def check_same(path: str, got: Any, wanted: Any) -> None:
    """Compares types, values and attributes."""
    assert type(got) is type(wanted), (path, type(got), type(wanted))
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), path
    elif isinstance(wanted, (dict, list, tuple, collections.deque)):
        is_dict = isinstance(wanted, dict)
        assert len(got) == len(wanted), path
        assert not is_dict or list(got) == list(wanted), path
        for place, key in enumerate(wanted):
            at = key if is_dict else place
            check_same(f"{path}.{at}", got[at], wanted[at])
    elif isinstance(wanted, np.ndarray):
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, io.BytesIO):
        assert got.getvalue() == wanted.getvalue()
    elif not isinstance(wanted, (Note, Thing)):
        assert got == wanted, path
    attributes = getattr(wanted, "__dict__", None)
    if attributes and not isinstance(wanted, (torch.Tensor, type, enum.Enum)):
        check_same(f"{path}.__dict__", vars(got), attributes)


def through_a_connection(state: Any, _: Path) -> Any:
    offer = Offer(state, [], Secret("right"))
    source = Source(offer.place, Secret("right"))
    try:
        return source.read(SOON)
    finally:
        source.close()
        until_over(offer)


def through_a_checkpoint(state: Any, path: Path) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    rest = pieces.take_apart(state, "one", tensors)
    pieces.write(path / "piece", {}, rest, tensors)
    piece = pieces.Piece(path / "piece")
    return pieces.put_together(piece.rest(), piece.tensors(tensors))


@pytest.mark.parametrize("way", [through_a_connection, through_a_checkpoint])
def test_all_that_a_state_dict_may_hold_arrives_as_it_was(way: Callable[..., Any], tmp_path: Path) -> None:
    check_same("state", way(everything(), tmp_path), everything())


def broadcast_everything() -> None:
    fogdist.init()
    context = fogdist.context.current()
    given = everything() if context.rank == 1 else {}
    check_same("state", parameters._broadcast_state(context, "state", given, 1), everything())
    model = Scaled()
    if context.rank == 1:
        model.history = everything()
    state = model.state_dict()
    fogdist.broadcast_parameters(state, 1)
    model.load_state_dict(state)
    check_same("state", model.history, everything())
    state["_extra_state"] = (lambda: 1) if context.rank == 1 else 2
    with pytest.raises(TypeError, match="params must be of types that can be pickled, got one that cannot"):
        fogdist.broadcast_parameters(state, 1)


def test_all_that_a_state_dict_may_hold_is_broadcast(worlds: WorldPool) -> None:
    worlds(2).run(broadcast_everything)


def test_a_state_whose_code_would_run_is_refused_unless_it_is_registered(tmp_path: Path) -> None:
    """By the rank that would give it, which names it, and by a process that reads it all the same."""
    for wrong in ([Thing()], {"a": os.system}, (1, lambda: 2), [Begun("x")]):
        with pytest.raises(TypeError, match=r"one\..*run code of its own.*add_safe_globals"):
            Offer({"one": wrong}, [], Secret("right"))
    with safe_globals([Thing]):
        got = through_a_connection({"one": [Thing()]}, tmp_path)
        assert got["one"][0].value == 3
        offer = Offer({"one": [Thing()]}, [], Secret("right"))
        time.sleep(0.1)
    with (
        contextlib.closing(Source(offer.place, Secret("right"))) as source,
        pytest.raises(transfer.dist.DistBackendError, match=r"Thing would run code.*add_safe_globals"),
    ):
        source.read(SOON)


# --- to whom ------------------------------------------------------------------------------------------------


def test_a_copy_is_not_written_before_the_device_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes it reads it by another stream than the one that makes it."""
    is_made, devices = threading.Event(), []

    class Mark:
        def __init__(self, device: torch.device) -> None:
            devices.append(device)

        def wait(self) -> None:
            assert is_made.wait(SOON)

    monkeypatch.setattr(transfer, "Mark", Mark)
    offer = Offer({"values": torch.ones(8)}, [], Secret("right"))
    with contextlib.closing(Source(offer.place, Secret("right"))) as source:
        timer = threading.Timer(0.3, is_made.set)
        timer.start()
        got = source.read(SOON)
    assert got is not None and got["values"].eq(1).all() and devices == [torch.device("cpu")]
    assert is_made.is_set()


@pytest.mark.parametrize("wrong", [Secret("wrong"), Secret("right", 2)], ids=["secret", "ticket"])
def test_who_does_not_know_the_secret_gets_nothing(offer: Offer, wrong: Secret) -> None:
    """The port stays open for the process that the state is for."""
    with pytest.raises(OSError):
        Source(offer.place, wrong).read(SOON)
    with socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as silent:
        assert len(silent.recv(100)) == 16
        source = Source(offer.place, Secret("right"))
        assert source.read(SOON) is not None
        source.close()


@pytest.mark.parametrize("at", [-1, 5000, 0], ids=["proof", "data", "size"])
def test_a_state_that_was_changed_on_its_way_is_not_loaded(offer: Offer, at: int) -> None:
    """By one that passes everything on, and changes one byte after the proofs of the beginning."""
    with (
        relay(offer.place["port"], at) as port,
        pytest.raises(ConnectionRefusedError, match="does not know the job's secret"),
    ):
        Source({"addresses": ["127.0.0.1"], "port": port}, Secret("right")).read(SOON)


@contextlib.contextmanager
def relay(port: int, at: int) -> Iterator[int]:
    """Passes one connection on, and changes the byte at that place of all that the rank sends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client = listener.accept()[0]
            server = socket.create_connection(("127.0.0.1", port))
            with client, server:
                client.sendall(server.recv(16, socket.MSG_WAITALL))
                server.sendall(client.recv(80, socket.MSG_WAITALL))
                client.sendall(server.recv(64, socket.MSG_WAITALL))
                head = server.recv(8 + 64, socket.MSG_WAITALL)
                whole = bytearray(
                    head + server.recv(int.from_bytes(head[:8], "big") + 64, socket.MSG_WAITALL)
                )
                whole[at] ^= 1
                with contextlib.suppress(OSError):  # it may have refused the size
                    client.sendall(whole)
                    client.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(SOON)
        assert not thread.is_alive()


def test_a_rank_that_closes_its_offer_ends_the_connection() -> None:
    """Before the process has come, and after."""
    offer = Offer(STATE, [], Secret("right"))
    offer.close()
    until_over(offer)
    with pytest.raises(OSError):
        Source(offer.place, Secret("right")).read(SOON)


def test_nobody_waits_for_a_process_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the copy kept for it."""
    monkeypatch.setattr(transfer, "_PATIENCE", 0.1)
    offer = Offer(STATE, [], Secret("right"))
    until_over(offer)
    assert not any("fog_state" in name for name in files())
    assert offer._state is None


def test_who_sends_byte_by_byte_keeps_no_port_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_PATIENCE", 1.0)
    offer = Offer(STATE, [], Secret("right"))
    deadline = time.monotonic() + SOON
    with (
        socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as unknown,
        contextlib.suppress(OSError),
    ):
        while offer.is_wanted:
            assert time.monotonic() < deadline
            unknown.sendall(b"x")
            time.sleep(0.2)


def test_the_proof_of_a_state_does_not_keep_the_process_waiting(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds for a large state. So it is made before the size is told, for which the process waits longest."""
    may_go_on = threading.Event()
    digest = transfer._digest

    def slow(file: IO[bytes], size: int) -> str:
        assert may_go_on.wait(SOON)
        return digest(file, size)

    monkeypatch.setattr(transfer, "_digest", slow)
    prove = Secret("right")
    with socket.create_connection(("127.0.0.1", offer.place["port"]), SOON) as process:
        nonces = process.recv(16, socket.MSG_WAITALL).hex(), "00" * 16
        process.sendall(bytes(16) + prove("fetches", *nonces).encode())
        assert process.recv(64, socket.MSG_WAITALL) == prove("gives", *nonces).encode()
        process.settimeout(0.5)
        with pytest.raises(TimeoutError):
            process.recv(8)
        may_go_on.set()
        process.settimeout(SOON)
        (size,) = transfer._SIZE.unpack(transfer._received(process, 8))
        transfer._received(process, 64 + size + 64)  # raises if less comes


def files() -> list[str]:
    found: list[Any] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found

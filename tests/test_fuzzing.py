"""Fuzzing: mutations of recorded real bytes, given to all that reads bytes from outside.

Right is a result, or an error of the type that the reader promises. A crash, a hang, an error of another type, or
memory without bounds is a defect. A failure names the seed, and the file that keeps the bytes.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from codec_lists import CODECS
from fogdist import checkpoint, flight_record, nested, timeline
from fogdist.checkpoint import pieces
from fogdist.elastic import transfer
from harness import World, error_of, fork
from test_shared_memory import RingTo, my_rank, write_to_inbox
from test_tcp import APART, HELLO, data_connections, exchange_with_all, listening_ports, visit

from fog_pg import _C, _joining

# Seconds for one reading, after which it counts as a hang, and for all of them.
HANG, PATIENCE = 20, 300.0
MEMORY = 1 << 30
FEW, MANY = 50, 5000
EXTREME = (0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1)
WORDS = (b"null", b"[]", b"{}", b'"x"', b"-1", b"1e400", b"NaN", b"1" * 400, b"true", b"")


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Returns the bytes with one to four mutations."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, other = (draw.randrange(len(out) + 1) for _ in range(2))
        length = draw.choice((1, 4, 8, 16, 100))
        way = draw.randrange(8)
        tokens = list(re.finditer(rb"[-\w.]+", out[at : at + 200])) if way >= 6 else []
        if way == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif way == 1:  # a length, or another number, where such fields stand
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(EXTREME) & ((1 << 8 * width) - 1)
            at -= at % width
            out[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
        elif way == 2:
            del out[at:]
        elif way == 3:
            out[at:at] = draw.randbytes(length)
        elif way == 4:
            del out[at : at + length]
        elif way == 5:
            one, two = out[at : at + length], out[other : other + length]
            out[at : at + length], out[other : other + length] = two, one
        elif tokens:  # a value in a text
            start, end = draw.choice(tokens).span()
            out[at + start : at + end] = draw.choice((*WORDS, str(draw.choice(EXTREME)).encode()))
    return bytes(out)


# --- what is recorded, by two ranks ---------------------------------------------------------------------------

STATE = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "names": ["a", "b"], "rate": np.float64(0.1)},
    "optimizer": collections.OrderedDict(step=3, betas=(0.9, 0.99), seen={1, 2}, at=range(3)),
}
DTYPES = (torch.float32, torch.bfloat16)


def no_secret(*_: str) -> str:
    """Proves everything, so that what is behind the proofs is reached."""
    return "0" * 64


GREETING = bytes(16) + no_secret().encode()


def end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side has dropped it already
        connection.shutdown(socket.SHUT_WR)


def write(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def record(folder: Path) -> None:
    """Writes what two ranks send, save and tell into files, in a folder for each target."""
    fogdist.init(fogdist.topology.ring)
    rank = fogdist.rank()
    (folder / "timeline").mkdir(exist_ok=True)
    timeline.start(f"{folder}/timeline/")
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fogdist.algorithms.DecentralizedSGD(sgd, model)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        bf.allreduce(torch.ones(3), name="a name")
    timeline.stop()
    checkpoint.save(folder / "checkpoint", model, optimizer, step=1, extra={"of": rank})
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "fog_flight_record" in os.readlink(f"/proc/self/fd/{name}"):
                write(folder / f"flight record/{rank}", os.pread(int(name), 1 << 24, 0))
    write(folder / f"message/{rank}", RingTo(rank).last_record())
    entry = _C.own_entry()
    write(folder / f"peer information/{rank}", entry)
    framed = [struct.pack("QQ", each, len(entry)) + entry.encode() for each in range(2)]
    write(folder / f"rendezvous/{rank}", framed[1] if rank else b"".join(reversed(framed)))
    told = dist.HashStore()
    _joining.publish(told, 0, 12345, 2, entry)
    write(folder / f"joining/{rank}", told.get(_joining._ENTRY.format(rank=0)))
    plain = nested.plain(STATE, torch.clone)
    for is_zip in (False, True):  # the archive has checksums, which hide what is behind them
        saved = io.BytesIO()
        torch.save(plain, saved, _use_new_zipfile_serialization=is_zip)
        write(folder / f"state/{is_zip}", saved.getvalue())
    offer = transfer.Offer(STATE, [], no_secret)
    with socket.create_connection(("127.0.0.1", offer.place["port"])) as connection:
        connection.sendall(GREETING)
        end(connection)
        write(folder / "a state's wire/of the rank", b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    write(folder / "a state's reader/greeting", GREETING)
    values = torch.randn(300, generator=torch.Generator().manual_seed(rank))
    for place, codec in enumerate(CODECS):
        for number, dtype in enumerate(DTYPES):
            write(folder / f"codecs/{place}-{number}", codec.encode(values.to(dtype)).numpy().tobytes())


# --- the readers ------------------------------------------------------------------------------------------------


def feed_codec(name: str, data: bytes, _: Path) -> None:
    place, number = map(int, name.split("-"))
    codec, output = CODECS[place], torch.empty(300, dtype=DTYPES[number])
    message = torch.tensor(list(data), dtype=torch.uint8)
    codec.backend.decode(message, output)


def feed_flight_record(_: str, data: bytes, __: Path) -> None:
    file = os.memfd_create("fog_flight_record")
    try:
        os.write(file, data[:12] + struct.pack("i", os.getpid()) + data[16:])
        flight_record.report([flight_record.read(os.getpid())])
    finally:
        os.close(file)


def feed_timeline(name: str, data: bytes, folder: Path) -> None:
    other = f"{1 - int(name[0])}.json"
    write(folder / name, data)
    shutil.copy(folder.parent / "timeline" / other, folder / other)
    timeline.merge([folder / name, folder / other], folder / "merged")


def feed_checkpoint(name: str, data: bytes, folder: Path) -> None:
    shutil.rmtree(folder / "1", ignore_errors=True)
    shutil.copytree((folder.parent / "checkpoint" / name).parents[name.count("/") - 1], folder / "1")
    write(folder / "1" / name.partition("/")[2], data)
    for rank in range(2):
        piece = pieces.Piece(folder / "1" / f"rank{rank}")
        piece.head()
        piece.rest()
        piece.tensors(piece.shapes)


def feed_rendezvous(_: str, data: bytes, __: Path) -> None:
    there: Any = dist.HashStore()
    there.append("fog/1/step/all", data)
    there.add("fog/1/step/count", 1)
    with contextlib.suppress(
        UnicodeDecodeError
    ):  # the engine gets bytes, and only this binding makes texts of them
        _C.Rendezvous(there, 0, 2, timedelta(seconds=HANG)).allgather("step", "of 0")


def feed_joining(_: str, data: bytes, __: Path) -> None:
    told = dist.HashStore()
    told.set(_joining._ENTRY.format(rank=0), data)
    for entry in _joining.read_world(told, 2).entries.values():
        _C.read_entry(entry)


def feed_state(_: str, data: bytes, __: Path) -> None:
    transfer.loaded(io.BytesIO(data))


def feed_state_wire(_: str, data: bytes, __: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = {"addresses": ["127.0.0.1"], "port": listener.getsockname()[1]}
        with (
            contextlib.closing(transfer.Source(place, no_secret)) as source,
            listener.accept()[0] as giver,
        ):
            giver.sendall(data)
            end(giver)
            source.read(HANG)


def feed_state_reader(_: str, data: bytes, __: Path) -> None:
    offer = transfer.Offer(STATE, [], no_secret)
    with (
        socket.create_connection(("127.0.0.1", offer.place["port"])) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(data)
        end(connection)
        if len(connection.recv(17, socket.MSG_WAITALL)) == 17:
            return
    with contextlib.closing(transfer.Source(offer.place, no_secret)) as source:
        assert source.read(HANG)
    raise ConnectionRefusedError


class Target(NamedTuple):
    feed: Callable[[str, bytes, Path], None]
    errors: tuple[type[Exception], ...]
    share: float = 1.0  # of the tries; the dearer ones have fewer


TARGETS = {
    "codecs": Target(feed_codec, (ValueError,)),
    "flight record": Target(feed_flight_record, (ValueError,)),
    "timeline": Target(feed_timeline, (ValueError,)),
    "checkpoint": Target(feed_checkpoint, (OSError, ValueError), 0.2),
    "rendezvous": Target(feed_rendezvous, (dist.DistBackendError,)),
    "peer information": Target(lambda _, data, __: _C.read_entry(data.decode(errors="replace")), ()),
    "joining": Target(feed_joining, (RuntimeError,)),
    "state": Target(feed_state, (dist.DistBackendError,)),
    "a state's wire": Target(feed_state_wire, (dist.DistBackendError, OSError)),
    "a state's reader": Target(feed_state_reader, (ConnectionRefusedError,), 0.2),
}

# What was found once, by the target: it comes first, as seed -1.
FOUND: dict[str, Callable[[bytes], bytes]] = {
    "a state's wire": lambda data: data[:80] + struct.pack("!Q", 2**63) + data[88:],  # no file has that size
    "rendezvous": lambda _: struct.pack("QQ", 1, 2**64 - 16),  # the next part stood where this one stands
    "flight record": lambda data: data[:24] + b"\xc3" * 64 + data[88:],  # a name without an end, and cut
}


def feed_all(name: str, recorded: Path, seeds: range) -> None:
    """Runs in a process of its own, which ends by a signal if a reading crashes or hangs."""
    target, folder = TARGETS[name], recorded / f"of {name}"
    folder.mkdir()
    samples = sorted(path for path in (recorded / name).rglob("*") if path.is_file())
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    counts = {"accepted": 0, "refused": 0}
    wrong = []
    for seed in range(-1 if name in FOUND else 0, seeds.stop):
        draw = random.Random(f"{name} {seed}")
        sample = draw.choice(samples)
        data = mutated(sample.read_bytes(), draw) if seed >= 0 else FOUND[name](sample.read_bytes())
        write(folder / "input", data)
        write(folder / "seed", f"{seed} of {sample.name}")
        signal.alarm(HANG)
        try:
            target.feed(str(sample.relative_to(recorded / name)), data, folder)
            counts["accepted"] += 1
        except Exception as error:
            is_clear = type(error) in target.errors or (
                OSError in target.errors and isinstance(error, OSError)
            )
            counts["refused"] += is_clear
            if not is_clear:
                shutil.copy(folder / "input", folder / f"input {seed}")
                wrong.append(f"seed {seed} of {sample.name}: {error!r:.300}")
        signal.alarm(0)
    write(folder / "counts", json.dumps([counts, wrong]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    world = World(2)
    world.run(record, folder)
    world.close()
    return folder


@pytest.mark.parametrize("tries", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_readers(recorded: Path, tmp_path: Path, tries: int) -> None:
    """Each reader in a process of its own."""
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    failures = []
    for name, target in TARGETS.items():
        log = tmp_path / f"{name}.log"
        process = fork(feed_all, name, tmp_path, range(int(tries * target.share)), log=log, environment={})
        process.join(PATIENCE)
        folder = tmp_path / f"of {name}"
        if process.exitcode != 0:
            seed = (folder / "seed").read_text() if (folder / "seed").exists() else "none"
            process.kill()
            failures.append(f"{name}: status {process.exitcode} at seed {seed}: {log.read_text()[-2000:]}")
            continue
        counts, wrong = json.loads((folder / "counts").read_text())
        print(f"{name}: {counts}, {len(wrong)} wrong")
        assert counts["refused"] or not target.errors, name
        failures += [f"{name}: {each}" for each in wrong[:5]]
    assert not failures, f"the bytes are in {tmp_path}:\n" + "\n".join(failures)


# --- the wires --------------------------------------------------------------------------------------------------


def greet(tries: int) -> dict[str, int]:
    """Rank 1 greets rank 0 as a process of the job does, with mutations; returns how far it came."""
    exchange_with_all()
    told: list[Any] = [None] * 2
    ports = listening_ports()  # before another one, for processes that join, comes to them
    (mark,) = (line.rpartition("=")[2] for line in _C.own_entry().splitlines() if " mark=" in line)
    dist.all_gather_object(told, (ports, int(mark, 16)))
    counts = dict.fromkeys(("greetings", "nonces", "welcomes"), 0)
    for seed in range(tries if dist.get_rank() == 1 else 0):
        draw = random.Random(f"greeting {seed}")
        (port,), its = told[0]
        hello = HELLO.pack(b"fog tcp2", draw.choice((-1, 1)), 0, told[1][1], its, draw.randbytes(16))
        right = hello
        while draw.random() < 0.5 and hello == right:
            hello = mutated(right, draw)
        with contextlib.suppress(ConnectionError), visit(port, hello) as connection:
            counts["greetings"] += 1
            if len(hello) < HELLO.size:
                end(connection)
            nonce = connection.recv(16, socket.MSG_WAITALL)
            counts["nonces"] += len(nonce) == 16
            proof = _C.hmac_sha256(_C.job_secret(), b"fog tcp connects" + hello[: HELLO.size] + nonce)
            connection.sendall(mutated(proof, draw) if draw.random() < 0.3 else proof)
            end(connection)
            counts["welcomes"] += connection.recv(33, socket.MSG_WAITALL)[:1] == b"y"
    exchange_with_all()
    return counts


@pytest.mark.parametrize("tries", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_greetings(new_world: Callable[..., World], tries: int) -> None:
    """The rank lives, keeps the connections that it has, and its results are right."""
    _, counts = new_world(2, environment=APART).run(greet, tries, timeout=PATIENCE)
    print(counts)
    assert counts["greetings"] == tries and counts["nonces"] and counts["welcomes"], counts


def message(tries: range) -> dict[str, int]:
    """Rank 1 writes mutated messages into rank 0's inbox; returns what became of their groups."""
    counts = {"accepted": 0, "refused": 0}
    for seed in tries:
        name = f"mutated {seed}"
        draw = random.Random(name)
        error = write_to_inbox(name, lambda ring, draw=draw: ring.write(mutated(ring.last_record(), draw)))
        counts["refused" if error else "accepted"] += my_rank() == 0
    return counts


@pytest.mark.parametrize("tries", [5, pytest.param(300, marks=pytest.mark.long)])
def test_messages_in_shared_memory(new_world: Callable[..., World], tries: int) -> None:
    """A group may fail by one, or a later message, and the process lives on; a world that ends is replaced."""
    done, total = 0, collections.Counter[str]()
    while done < tries:
        world = new_world(2, initialize=False)
        found, _ = world.run(message, range(done, tries), timeout=PATIENCE)
        total.update(found)
        done += sum(found.values())
        world.close()
    print(total)
    assert total["refused"], total


def frame(seed: int, sent: bytes) -> str:
    """Rank 1 writes a mutated frame into its connection with rank 0; returns what an exchange raises then."""
    error = error_of(exchange_with_all)  # the frame may come to rank 0 before it has left this one
    if dist.get_rank() == 1:
        draw = random.Random(f"frame {seed}")
        (connection,) = data_connections()
        with connection, contextlib.suppress(ConnectionError):
            if draw.random() < 0.5:  # a message
                connection.sendall(struct.pack("<IIQ", 1, 0, len(sent)) + mutated(sent, draw))
            else:
                head = struct.pack("<IIQ", draw.randrange(7), draw.randrange(4), draw.choice(EXTREME))
                connection.sendall(head + draw.randbytes(draw.choice((0, 8, 200))))
    return error or error_of(exchange_with_all)


@pytest.mark.long
def test_frames(new_world: Callable[..., World], recorded: Path) -> None:
    """The exchange is right, or both raise: at once, or when its time is over."""
    total = collections.Counter[str]()
    sent = next((recorded / "message").iterdir()).read_bytes()
    for seed in range(30):
        errors = new_world(2, environment=APART, timeout=3.0).run(frame, seed, sent)
        total["refused" if any(errors) else "accepted"] += 1
    print(total)

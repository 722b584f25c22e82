"""Tests of the job's secret: the proof against published vectors and Python's, where the secret comes from, who is refused."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import World, init_process_group
from hosts import PORT, address, run_on_hosts

from fog_pg import environment
from fog_pg._extension import load

LONG = (
    b"This is a test using a larger than block-size key and a larger than block-size data. "
    b"The key needs to be hashed before being used by the HMAC algorithm."
)
TIMEOUT = 30.0
# RFC 4231, cases 1 to 4, 6 and 7: key, data, HMAC-SHA-256.
VECTORS = [
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    (
        b"Jefe",
        b"what do ya want for nothing?",
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
    ),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (
        bytes(range(1, 26)),
        b"\xcd" * 50,
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b",
    ),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        LONG,
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
]


@pytest.mark.parametrize(("key", "data", "proof"), VECTORS)
def test_published_vectors(key: bytes, data: bytes, proof: str) -> None:
    assert load().hmac_sha256(key, data).hex() == proof


def test_all_lengths_near_a_block_as_python() -> None:
    draw = random.Random(1)
    extension = load()
    for key_bytes in (0, 1, 16, 63, 64, 65, 200):
        key = draw.randbytes(key_bytes)
        for data_bytes in (*range(130), 1000, 100_000):
            data = draw.randbytes(data_bytes)
            assert extension.hmac_sha256(key, data) == hmac.new(key, data, hashlib.sha256).digest()


def test_random_secrets_differ() -> None:
    secrets = {load().random_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in secrets)


@pytest.mark.parametrize("text", ["short", "15 characters.."])
def test_a_short_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"FOG_JOB_SECRET: got \d+ characters; allowed are texts of at least 16"
    ) as raised:
        environment.JOB_SECRET.get({"FOG_JOB_SECRET": text})
    assert text not in str(raised.value)


def settle_secret(secret: str) -> str:
    """Makes a group; returns the secret that this process then knows."""
    if secret:
        os.environ["FOG_JOB_SECRET"] = secret
    init_process_group(TIMEOUT)
    return load().job_secret()


def test_rank_zero_makes_the_secret(new_world: Callable[..., World]) -> None:
    world = new_world(3, initialize=False)
    secrets = world.run(settle_secret, "")
    assert len(set(secrets)) == 1 and re.fullmatch("[0-9a-f]{64}", secrets[0])


def test_the_environment_gives_the_secret(new_world: Callable[..., World]) -> None:
    given = "a secret of this test"
    world = new_world(2, initialize=False)
    assert world.run(settle_secret, given) == [given] * 2


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        (["", "the secret of rank 1"], "rank 0 has none, rank 1 has one"),
        (["the secret of rank 0", ""], "rank 0 has one, rank 1 has none"),
        (["the secret of rank 0", "the secret of rank 1"], "rank 0 has one, rank 1 has another"),
    ],
)
def test_ranks_with_different_secrets_learn_it(
    new_world: Callable[..., World], secrets: list[str], message: str
) -> None:
    world = new_world(2, initialize=False)
    for outcome in world.run_by_rank(settle_secret, [(secret,) for secret in secrets]):
        assert message in str(outcome.error)
        assert "the secret of" not in str(outcome.error)


def visit_without_the_secret(folder: str) -> list[bytes]:
    """Rank 1 connects to rank 0 as each of several strangers; returns what rank 0 has answered to them."""
    told = Path(folder, "listener")
    if dist.get_rank() == 0:
        listeners = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                each = socket.socket(fileno=int(name))
                try:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listeners.append(each.getsockname()[:2])
                finally:
                    each.detach()
        ports = [port for host, port in listeners if host == address(0) and port != PORT]
        told.with_suffix(".new").write_text("\n".join(map(str, ports)))
        told.with_suffix(".new").rename(told)
    answers = []
    while not told.exists():
        time.sleep(0.01)
    if dist.get_rank() == 1:
        for port in map(int, told.read_text().split()):
            for greeting in (b"", b"x" * 8, struct.pack("ii", 1, 0) + b"n" * 16 + b"p" * 32, b"\0" * 56):
                with socket.create_connection((address(0), port), timeout=20) as connection:
                    connection.sendall(greeting)
                    connection.shutdown(socket.SHUT_WR)
                    answers.append(_until_closed(connection))
    dist.barrier()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    return answers


def _until_closed(connection: socket.socket) -> bytes:
    """Returns what arrives until the other side closes; that side looks while it takes part in operations."""
    answer = b""
    connection.setblocking(False)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            if not (more := connection.recv(100)):
                break
            answer += more
        time.sleep(0.01)
    return answer


def test_a_stranger_gets_no_answer_of_another_host(tmp_path: Path) -> None:
    """Whatever it sends, the listener answers nothing; the ranks work on."""
    _, (answers,) = run_on_hosts(tmp_path, [0, 1], __name__, [("visit_without_the_secret", [str(tmp_path)])])
    assert answers and set(answers) == {b""}

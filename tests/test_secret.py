"""Tests of the job's secret: the proof against Python's, where the secret comes from and stays, who is refused."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import random
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import World, init_process_group
from hosts import PORT, address, run_on_hosts

from fog_pg import environment
from fog_pg._extension import load

TIMEOUT = 30.0


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


def meet_in_a_file(path: str, prefix: str, secret: str) -> tuple[str, str]:
    """Makes a group over a file, and what can be joined; returns the secret, and the error of the first group."""
    os.environ["FOG_JOB_SECRET"] = secret
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if prefix:
            store = dist.PrefixStore(prefix, dist.FileStore(path, size))
            dist.init_process_group("fog", store=store, rank=rank, world_size=size)
        else:
            dist.init_process_group("fog", init_method=f"file://{path}", rank=rank, world_size=size)
    except dist.DistBackendError as error:
        return load().job_secret(), str(error)
    fogdist.init(fogdist.RingGraph)
    model = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fogdist.algorithms.DecentralizedSGD(sgd, model, on_loss="continue")
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return load().job_secret(), ""


@pytest.mark.parametrize("prefix", ["", "a prefix"])
@pytest.mark.parametrize("secret", ["", "a secret of this test"])
def test_no_secret_enters_a_file(
    new_world: Callable[..., World], tmp_path: Path, prefix: str, secret: str
) -> None:
    """Other users can read it. With no secret, ranks of one host work, but nobody can connect with them or join them.

    Regression: they listened nevertheless, and a stranger's first proof ended the job.
    """
    path = tmp_path / "store"
    world = new_world(2, initialize=False, environment={"FOG_BETWEEN_HOSTS": "tcp"})
    assert world.run(meet_in_a_file, str(path), prefix, secret) == [(secret, "")] * 2
    written = path.read_bytes()
    assert b"secret of" not in written and b"fog/world/secret" not in written
    assert (b"fog/world/entry/1" in written) == (b" mark=" in written) == bool(secret)
    assert (b"because their Store is a file: set FOG_JOB_SECRET" in written) == (not secret)
    # Rank 0 would have made one of 64 hexadecimal digits.
    assert secret or not re.search(rb"[0-9a-f]{64}", written)


def test_ranks_that_need_a_secret_say_so_over_a_file(new_world: Callable[..., World], tmp_path: Path) -> None:
    apart = {"FOG_BETWEEN_HOSTS": "tcp", "FOG_LOCAL_LINKS": "0"}
    found = new_world(2, initialize=False, environment=apart).run(
        meet_in_a_file, str(tmp_path / "store"), "", ""
    )
    assert all(not secret and "a file: set FOG_JOB_SECRET" in error for secret, error in found), found


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
    connections = []
    while not told.exists():
        time.sleep(0.01)
    if dist.get_rank() == 1:
        for port in map(int, told.read_text().split()):
            for greeting in (b"", b"x" * 8, struct.pack("ii", 1, 0) + b"n" * 16 + b"p" * 32, b"\0" * 56):
                connections.append(socket.create_connection((address(0), port), timeout=20))
                connections[-1].sendall(greeting)
                connections[-1].shutdown(socket.SHUT_WR)
    answers = _until_closed(connections)
    dist.barrier()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    return answers


def _until_closed(connections: list[socket.socket]) -> list[bytes]:
    """Returns what each of them gets until the other side closes it; that side looks while it takes part in operations."""
    answers = dict.fromkeys(connections, b"")
    left = set(connections)
    deadline = time.monotonic() + 3.0
    while left and time.monotonic() < deadline:
        for connection in select.select(list(left), [], [], 0.1)[0]:
            more = b""
            with contextlib.suppress(ConnectionResetError):
                more = connection.recv(100)
            answers[connection] += more
            left -= set() if more else {connection}
    for connection in connections:
        connection.close()
    return list(answers.values())


def test_a_stranger_gets_no_answer_of_another_host(tmp_path: Path) -> None:
    """Whatever it sends, the listener answers nothing; the ranks work on."""
    _, (answers,) = run_on_hosts(tmp_path, [0, 1], __name__, [("visit_without_the_secret", [str(tmp_path)])])
    assert answers and set(answers) == {b""}

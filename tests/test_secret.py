"""Tests of the job's secret: the proof against Python's, where the secret comes from and stays, who is refused."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import fogdist
import pytest
import torch
import torch.distributed as dist
from harness import World, init_process_group

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


@pytest.mark.parametrize("text", ["short", "15 characters.."])
def test_a_short_secret_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"FOG_JOB_SECRET: got \d+ characters; allowed are texts of at least 16"
    ) as raised:
        environment.JOB_SECRET.get({"FOG_JOB_SECRET": text})
    assert text not in str(raised.value)


def settle_secret(secret: str) -> str:
    """Makes a group; returns the secret that this process then knows."""
    load()  # variables that are set after this, too, count for the next group
    if secret:
        os.environ["FOG_JOB_SECRET"] = secret
    init_process_group(TIMEOUT)
    return load().job_secret()


def test_rank_zero_makes_the_secret(new_world: Callable[..., World]) -> None:
    world = new_world(3, initialize=False)
    secrets = world.run(settle_secret, "")
    assert len(set(secrets)) == 1 and re.fullmatch("[0-9a-f]{64}", secrets[0])


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
    fogdist.init(fogdist.topology.ring)
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

    Regression: they listened nevertheless, and the first proof of an unknown process ended the job.
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
    apart = {"FOG_BETWEEN_HOSTS": "tcp", "_FOG_LOCAL_LINKS": "0"}
    found = new_world(2, initialize=False, environment=apart).run(
        meet_in_a_file, str(tmp_path / "store"), "", ""
    )
    assert all(not secret and "a file: set FOG_JOB_SECRET" in error for secret, error in found), found

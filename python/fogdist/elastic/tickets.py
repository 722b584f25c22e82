"""How a process comes into a job that trains already: what it and the job's ranks tell each other.

A process that joins takes a *ticket* in the Store of the job's first group, and tells what it is: its rank, how to
connect with it, its objects, and a proof that it knows the job's secret. It draws the attention of the ranks by a
counter in their shared memory, so a rank that looks for joiners in each step reads a number and asks nobody
(`Admission.is_quiet`). The rank with the lowest number answers: it refuses, with the reason, or copies the state of its
objects and trains on, while the joiner reads that (`fogdist.elastic.transfer`). When the joiner has loaded the state it
says that it is ready. Only then do the ranks agree, as after a loss (`fogdist.membership`), and all that they do for it
is to agree.

Between hosts, the joiner calls each rank at the port where that one listens for messages, and
proves that it knows the secret; then the rank counts the call by itself. The joiner is ready only when all ranks have
heard it, so a link that is cut keeps it away, and delays nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fog_pg import _extension
from fog_pg._joining import World
from fogdist.agreement import some
from fogdist.elastic.protocol import Request

# Keys of the Store: how many tickets there are, the first that is not over, and the nonce of the rank that answers.
COUNT = "fog/join/count"
FIRST = "fog/join/first"
NONCE = "fog/join/nonce"
_OBJECTS = "fog/join/objects"
# The name of the topology among the objects.
TOPOLOGY = "topology"


def key(ticket: int, what: str) -> str:
    return f"fog/join/{ticket}/{what}"


def delete(store: dist.Store, ticket: int, *whats: str) -> None:
    for what in whats:
        with contextlib.suppress(NotImplementedError):  # some of torch's Stores cannot
            store.delete_key(key(ticket, what))


def proof_of(purpose: str, *parts: str, group: int, ticket: int) -> str:
    """Returns the proof that this process knows the secret. `group` and a nonce in `parts` bind it to this job."""
    secret = _extension.load().job_secret().encode()
    text = "\0".join(("fog join", purpose, str(group), str(ticket), *parts))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def signed(purpose: str, values: Mapping[str, Any], *nonces: str, group: int, ticket: int) -> str:
    """Returns values as a text, with the proof that they come from a process that knows the secret."""
    told = json.dumps(values)
    return json.dumps({"told": told, "proof": proof_of(purpose, *nonces, told, group=group, ticket=ticket)})


def opened(text: str, purpose: str, *nonces: str, group: int, ticket: int) -> dict[str, Any]:
    """Returns the values of a text of `signed`.

    Raises:
        PermissionError: The proof is wrong.
        ValueError, TypeError, KeyError, RecursionError: The text is of another form.
    """
    given = json.loads(text)
    told, proof = given["told"], given["proof"]
    right = proof_of(purpose, *nonces, str(told), group=group, ticket=ticket)
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(errors="replace"), right.encode()):
        raise PermissionError("the proof is wrong")
    values: dict[str, Any] = json.loads(told)
    return values


def publish_object(store: dist.Store, name: str, items: Sequence[str]) -> None:
    """Tells the Store what a joiner's object of this name must be like."""
    before = store.get(_OBJECTS).decode() if store.check([_OBJECTS]) else ""
    # Other ranks may tell theirs meanwhile.
    while (objects := json.loads(before or "{}")).get(name) != list(items):
        before = store.compare_set(_OBJECTS, before, json.dumps({**objects, name: list(items)})).decode()


def check_object(world: World, name: str, argument: str, items: Sequence[str]) -> None:
    """Compares an object of a joiner with that of the job.

    Args:
        world: The job.
        name: The object's.
        argument: What the items describe, for the message.
        items: As the ranks of the job compare them among themselves.

    Raises:
        ValueError: The job has no such object, or another one.
    """
    objects = _objects(world.store)
    if name not in objects:
        raise ValueError(
            f"{argument} must be as on the ranks of the job that this process joins: it makes {name}, the job has "
            f"{', '.join(each for each in objects if each != TOPOLOGY) or 'nothing that can be joined'}"
        )
    mine, theirs = set(items), set(objects[name])
    if mine != theirs:
        raise ValueError(
            f"{argument} must be the same as on the ranks of the job that this process joins, but differs:\n"
            f"  only here: {some(sorted(mine - theirs)) or 'nothing'}\n  only there: {some(sorted(theirs - mine)) or 'nothing'}"
        )


def _objects(store: dist.Store) -> dict[str, list[str]]:
    if not store.check([_OBJECTS]):
        return {}
    objects: dict[str, list[str]] = json.loads(store.get(_OBJECTS))
    return objects


def request_from(group: int, ticket: int, text: str) -> Request:
    """Returns the request of a ticket.

    Raises:
        ValueError: Its proof or its form is wrong; the message is the reason for the joiner.
    """
    try:
        told = opened(text, "request", group=group, ticket=ticket)
        request = Request.from_values({**told, "ticket": ticket})
    except PermissionError:
        raise ValueError("it does not know the job's secret (FOG_JOB_SECRET)") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("its request is not complete") from None
    texts = (request.entry, request.at, request.nonce, request.challenge, *request.objects)
    if type(request.rank) is not int or not all(isinstance(each, str) for each in texts):
        raise ValueError("its request is not complete")
    return request

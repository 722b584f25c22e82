"""Random draws that all ranks make alike from a shared seed, without talking to each other.

Ranks may run different versions of Python and NumPy. Only `random.Random.random` after seeding with a string
is promised to give the same numbers in all of them, so everything is made from these numbers.
"""

from __future__ import annotations

import random


def permutation(count: int, *key: object) -> list[int]:
    """Returns 0 ... count-1 in a random order, the same for the same key, independent between keys."""
    uniform = random.Random("/".join(map(str, key))).random
    keys = [uniform() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def choice(count: int, *key: object) -> int:
    """Returns one of 0 ... count-1, uniformly, the same for the same key, independent between keys."""
    # random() is below 1, and the product of a float below 1 and a count below 2^53 rounds below the count.
    return int(random.Random("/".join(map(str, key))).random() * count)

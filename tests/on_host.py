"""Runs functions of a test module on one rank and prints what each returns; `hosts.run_on_hosts` starts it.

Arguments: the module's name, the group's timeout in seconds, a list of [function, [argument, ...]] as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import timedelta

import torch.distributed as dist

import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed


def main() -> None:
    module, timeout, calls = sys.argv[1:]
    functions = importlib.import_module(module)
    dist.init_process_group("fog", timeout=timedelta(seconds=float(timeout)))
    for name, arguments in json.loads(calls):
        print(json.dumps({"returned": getattr(functions, name)(*arguments)}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

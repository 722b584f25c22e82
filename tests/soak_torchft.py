"""The soak with faults, also of torchft, for comparison; in an environment that has it (PyPI: torchft).

    python tests/soak_torchft.py --modes torchft torchft-tuned --minutes 5

A rank is a replica group of its own, on Gloo, and its step is an average of the same size. A step that does not commit is
made again. "torchft" has the settings of its README, whose server waits 10 s for replicas and 5 s for heartbeats;
"torchft-tuned" those that suit a host on which a step takes milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from soak_modes import GROUP_TIMEOUT, NUMEL, Board, Mode

_SERVER = """
import sys, threading
from torchft.coordination import LighthouseServer
join, heartbeat = map(int, sys.argv[1:])
server = LighthouseServer(
    bind="[::]:0", min_replicas=1, join_timeout_ms=join, quorum_tick_ms=100, heartbeat_timeout_ms=heartbeat
)
print(server.address(), flush=True)
threading.Event().wait()
"""


class Torchft(Mode):
    """Averages over those that torchft knows to live."""

    all_wait = True
    initialize = False
    patience = 60.0
    tail = 30.0
    # Milliseconds for which the server waits.
    JOIN, HEARTBEAT = 10_000, 5_000

    @classmethod
    @contextlib.contextmanager
    def around(cls) -> Iterator[dict[str, str]]:
        # In a process of its own: inside of this one it has crashed it.
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(cls.JOIN), str(cls.HEARTBEAT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert server.stdout is not None
            yield {"TORCHFT_LIGHTHOUSE": server.stdout.readline().strip()}
        finally:
            server.kill()
            server.communicate()

    def __init__(self, rank: int, board: Board) -> None:
        from torchft import Manager, ProcessGroupGloo

        super().__init__(rank, board)
        timeout = timedelta(seconds=GROUP_TIMEOUT)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=lambda state: None,
            state_dict=lambda: {"nothing": torch.zeros(1)},
            min_replica_size=1,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=self.patience),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
            replica_id=str(rank),
            hostname="127.0.0.1",
            init_sync=False,
        )

    def step(self) -> bool:
        committed = False
        while not committed:
            self.manager.start_quorum()
            tensor = torch.full((NUMEL,), float(2**self.rank))
            self.manager.allreduce(tensor).wait()
            committed = self.manager.should_commit()
            self.report.raised += not committed
        size = self.manager.num_participants()
        total = tensor * size
        is_sum = bool((total == total[0]).all()) and int(total[0]).bit_count() == size
        self.expect(f"the average over {size} is {tensor.unique()}", is_sum)
        return bool(self.board.over[0])

    def close(self) -> None:
        self.manager.shutdown(wait=False)


class Tuned(Torchft):
    """The same with shorter waits."""

    JOIN, HEARTBEAT = 100, 1_000
    tail = 8.0


if __name__ == "__main__":
    import soak_faults
    import soak_torchft  # ranks find its classes by this name

    soak_faults.MODES.update({"torchft": soak_torchft.Torchft, "torchft-tuned": soak_torchft.Tuned})
    sys.exit(soak_faults.main())

"""A script that runs an ipyparallel engine which SIGINT interrupts only while it runs a cell.

ipyparallel's own engine can be interrupted from reading a request until it has answered. The cells of some ranks end
before those of others, so a SIGINT may arrive just before or after a cell. It would then interrupt the answer, for
which the notebook would wait forever.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any


def main() -> None:
    """Runs the engine, with the arguments of ``ipengine``."""
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the folder of a script, which is a package here
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):  # type: ignore[misc]
        def init_signal(self) -> None:
            super().init_signal()
            # The hooks would turn SIGINT into a KeyboardInterrupt during the whole request.
            self.kernel.pre_handler_hook = self.kernel.post_handler_hook = lambda: None
            cells: dict[str, Any] = self.kernel.shell.user_global_ns

            def interrupt(number: int, frame: FrameType | None) -> None:
                while frame is not None:
                    if frame.f_globals is cells:  # the frame of a cell, or of a function defined in a cell
                        raise KeyboardInterrupt
                    frame = frame.f_back

            signal.signal(signal.SIGINT, interrupt)

    Engine.launch_instance()


if __name__ == "__main__":
    main()

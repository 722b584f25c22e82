"""An engine of ipyparallel that SIGINT interrupts only while it runs a cell; a script by itself.

An engine as it comes can be interrupted from when it reads a request to when it has answered. A SIGINT just before or after the
cell, as the cells of some ranks end before those of others, then ends the answer, which the notebook would wait for forever.
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
        del sys.path[0]  # of a script; this one's folder is a package
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):  # type: ignore[misc]
        def init_signal(self) -> None:
            super().init_signal()
            # These make SIGINT a KeyboardInterrupt while a request is handled.
            self.kernel.pre_handler_hook = self.kernel.post_handler_hook = lambda: None
            cells: dict[str, Any] = self.kernel.shell.user_global_ns

            def interrupt(number: int, frame: FrameType | None) -> None:
                while frame is not None:
                    if frame.f_globals is cells:  # of a cell, or of a function that one has defined
                        raise KeyboardInterrupt
                    frame = frame.f_back

            signal.signal(signal.SIGINT, interrupt)

    Engine.launch_instance()


if __name__ == "__main__":
    main()

"""What a capture that takes long is at: a loop in Python is traced op by op, in silence, for as long as it takes."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from autopart.capture_place import Where, own_place

AFTER_S = 60.0
"""Of the first line; each further one comes after twice as long."""


@contextmanager
def told_where(where: Where) -> Iterator[None]:
    """While the block runs, lines on the first rank's stderr that say in which module and source line it is."""
    if os.environ.get("RANK", "0") != "0" or sys.stderr is None:
        yield
        return
    # kept: the stream may be replaced while the thread runs
    done, traced, stream = threading.Event(), threading.get_ident(), sys.stderr

    def watch() -> None:
        wait, passed = AFTER_S, 0.0
        while not done.wait(wait):
            passed += wait
            place = own_place(traceback.extract_stack(sys._current_frames()[traced]))
            print(
                f"[autopart] capturing for {passed:.0f} s, now in {where.path or 'the model'} at {place}; loops in "
                "Python are traced op by op: fewer turns, or tensor ops in their place, are captured sooner",
                file=stream,
                flush=True,
            )
            wait = passed

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

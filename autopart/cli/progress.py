"""What a command is doing, on stderr, once that takes longer than a second."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import time
from collections.abc import Iterator

_AFTER_S = 1.0
_EVERY_S = 0.5


@contextlib.contextmanager
def working(doing: str) -> Iterator[None]:
    """Says what is being done inside the block: a line that counts seconds on a terminal, else one line."""
    with Progress() as progress:
        progress(doing)
        yield


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Around a capture: torch prints graphs beside the error that it raises, which the user is told in one line.

    Whatever else is written to stderr inside appears after the block, unless the block ends in an error; what a model
    prints goes :func:`aside`.
    """
    logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.ERROR)
    written = io.StringIO()
    with aside(), contextlib.redirect_stderr(written):
        yield
    sys.stderr.write(written.getvalue())


def aside() -> contextlib.AbstractContextManager[object]:
    """Inside, what is printed goes to stderr: stdout has a command's answer alone, and users' models may print."""
    return contextlib.redirect_stdout(sys.stderr)


class Progress:
    """Called with each next thing that is being done; a context that ends with the last of them."""

    def __init__(self) -> None:
        self._doing = ""
        self._since = 0.0
        self._shown = False
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        # Kept: a test or a caller may replace sys.stderr while the thread runs.
        self._stream = sys.stderr

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._finish()

    def __call__(self, doing: str) -> None:
        with self._lock:
            self._finish()
            self._doing, self._since = doing, time.monotonic()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            with self._lock:
                if self._doing and time.monotonic() - self._since >= _AFTER_S:
                    self._show()

    def _show(self) -> None:
        if self._stream.isatty():
            print(f"\r{self._doing} … {time.monotonic() - self._since:.0f} s", end="", file=self._stream, flush=True)
        elif not self._shown:
            print(f"{self._doing} …", file=self._stream, flush=True)
        self._shown = True

    def _finish(self) -> None:
        if self._shown and self._stream.isatty():
            print(file=self._stream, flush=True)
        self._shown = False

"""What torch.export prints: whole graphs before it fails, of models that are captured by another try, or are refused in
words of autopart's own; and that attributes were assigned, which autopart has a note on (``set_by_forward.py``).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_GRAPH = "def forward(self, arg"
_ASSIGNED = r"The tensor attributes? .* (was|were) assigned during export"


@contextmanager
def without_graphs() -> Iterator[None]:
    """Inside, graphs stay off stderr, and so do warnings of shapes and of attributes.

    With ``TORCH_LOGS`` set all is as it is.
    """
    if os.environ.get("TORCH_LOGS") or sys.stderr is None:
        yield
        return
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_error)
    try:
        with redirect_stderr(_WithoutGraphs(sys.stderr)), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ASSIGNED)
            yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _WithoutGraphs:
    """A stream that leaves out graphs, each of which comes as one text with an end of line behind it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._left_out = False

    def write(self, text: str) -> int:
        left_out, self._left_out = self._left_out, _GRAPH in text
        if self._left_out or (left_out and text == "\n"):
            return len(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

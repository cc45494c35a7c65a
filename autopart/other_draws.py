"""Whether a model drew random numbers of Python or NumPy while it was traced: a graph has them as constants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

DRAWS = "the model draws from"
"""How the note on a generator begins."""


@contextmanager
def other_draws() -> Iterator[list[str]]:
    """Inside, draws from the global generators of Python and NumPy are noticed; filled at the end with their names."""
    found: list[str] = []
    python, numpy = random.getstate(), _numpy_state()
    yield found
    if random.getstate() != python:
        found.append("Python's random")
    if _numpy_state() != numpy:
        found.append("numpy.random")


def _numpy_state() -> tuple[object, ...]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    words = state["state"]
    return words["key"].tobytes(), words["pos"], state["has_gauss"], state["gauss"]


def note_on_draws(generator: str) -> str:
    """What is said of a generator."""
    return (
        f"{DRAWS} {generator} while it runs (SpecAugment and skipped layers of speech models do); what "
        "was drawn at capture holds for every step and rank. Switch that off, or draw with torch"
    )

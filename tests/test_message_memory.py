"""What plans count for messages of gradients and weights."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopart.message_memory import Alike, message_bytes, staying_bytes
from autopart.runtime.buckets import BUCKET_BYTES

SMALL, LARGE = BUCKET_BYTES // 4, 8 * BUCKET_BYTES


def alike(level: int, *sizes: float) -> Alike:
    found = Alike(level)
    for size in sizes:
        found.add(size)
    return found


def held(parameters: Sequence[Alike], replicas: int, summed: float) -> float:
    """All step, and while a message is made."""
    stays = sum(staying_bytes(own.level, own.bytes, replicas, summed) for own in parameters)
    return stays + message_bytes(parameters, replicas, summed)


@pytest.mark.parametrize(("level", "bytes_held"), [(0, SMALL), (1, SMALL + SMALL / 4), (2, 3.25 * SMALL), (3, 0.0)])
def test_one_message(level: int, bytes_held: float) -> None:
    assert held([alike(level, SMALL / 2, SMALL / 2)], 4, 1.0) == bytes_held


def test_many_messages() -> None:
    """One that is made beside one on its way, of the largest; level 1 keeps what arrives."""
    sizes = [SMALL] * 100
    assert held([alike(0, *sizes)], 4, 1.0) == BUCKET_BYTES
    assert held([alike(1, *sizes)], 4, 1.0) == BUCKET_BYTES + 25 * SMALL
    assert held([alike(2, *sizes)], 4, 1.0) == 3.25 * BUCKET_BYTES
    assert held([alike(2, LARGE, *sizes)], 4, 1.0) == 3.25 * LARGE
    assert held([alike(0, LARGE, *sizes), alike(2, *sizes)], 4, 1.0) == 3.25 * BUCKET_BYTES


def test_sums_in_another_type() -> None:
    """Twice as wide: converted messages, which stay until the end of the step where the last microbatch makes them."""
    sizes = [SMALL] * 100
    assert held([alike(0, *sizes)], 4, 2.0) == 100 * SMALL + 3 * BUCKET_BYTES
    assert held([alike(1, *sizes)], 4, 2.0) == 150 * SMALL + 3 * BUCKET_BYTES
    assert held([alike(2, *sizes)], 4, 2.0) == 6.5 * BUCKET_BYTES
    assert held([alike(0, *sizes)], 4, 0.5) == 1.5 * BUCKET_BYTES


def test_weights_arrive_before_there_are_gradients() -> None:
    """Of level 2, whose shares of gradients are small, two messages and their parts are more."""
    assert held([alike(2, LARGE)], 64, 1.0) == pytest.approx(LARGE * (3 + 1 / 64))
    assert held([alike(1, LARGE)], 2, 1.0) == LARGE * 1.5

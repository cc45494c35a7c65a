"""What plans count for messages of gradients and weights, and for what the optimizer makes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from autopart.message_memory import Alike, message_bytes, staying_bytes
from autopart.passes.annotate import parameter_bytes
from autopart.runtime.buckets import BUCKET_BYTES
from autopart.runtime.errors import PlanError
from autopart.solver.stages_passing import passing
from autopart.solver.stages_runs import Runs
from autopart.update_memory import OPTIMIZERS, temporary_bytes
from autopart.verify.live_bytes import LiveBytes

SMALL, LARGE = BUCKET_BYTES // 4, 8 * BUCKET_BYTES


def alike(level: int, *sizes: float) -> Alike:
    return Alike(level, sum(sizes), max(sizes))


def held(parameters: Sequence[Alike], replicas: int, summed: float) -> float:
    """All step, and while a message is made."""
    stays = sum(staying_bytes(own.level, float(own.bytes), replicas, summed) for own in parameters)
    return stays + float(message_bytes(parameters, replicas, summed, BUCKET_BYTES))


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


@pytest.mark.parametrize("seed", range(20))
def test_stages_have_what_their_own_parameters_take(seed: int) -> None:
    """Of all runs of blocks at once as of one after the other, and as of the parameters themselves."""
    rng, count = random.Random(seed), 7
    sizes = [SMALL / 3, SMALL, 2 * SMALL, LARGE]
    parameters = [
        (tuple(sorted(rng.sample(range(count), rng.choice([1, 1, 2])))), rng.choice(sizes), rng.randint(0, 2))
        for _ in range(12)
    ]
    apart, summed, limit = rng.random() < 0.5, rng.choice([0.5, 1.0, 2.0]), rng.choice([SMALL, BUCKET_BYTES])
    found = passing(
        [(blocks, level, level, size) for blocks, size, level in parameters],
        [(blocks, size) for blocks, size, _ in parameters],
        4,
        summed,
        apart,
        limit,
    )
    member = np.array([[block < end for block in range(count)] for end in range(count + 1)])
    runs = Runs.of(member)
    messages, updates = found.messages_of(member, runs), found.updates_of(member, runs)
    for number, (first, last) in enumerate(zip(runs.first, runs.last, strict=True)):
        inside = set(range(first, last))
        own = [(size, level) for blocks, size, level in parameters if inside & set(blocks)]
        by_level = [[size for size, other in own if other == level] for level in (0, 1, 2)]
        wanted = message_bytes([alike(level, *some) for level, some in enumerate(by_level) if some], 4, summed, limit)
        assert messages[number] == pytest.approx(wanted) == found.message_bytes(inside)
        made = (max if apart else sum)([0.0, *(size for size, _ in own)])
        assert updates[number] == pytest.approx(made) == found.update_bytes(inside)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adagrad", "sgd", "momentum"])
def test_what_an_optimizer_makes(name: str, together: bool) -> None:
    """Counted in torch's own, one parameter after the other and all at once."""
    sizes = [300, 1000, 1000, 50]
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    kinds = {"adam": "Adam", "adamw": "AdamW", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
    more = {"momentum": 0.9} if name == "momentum" else {}
    optimizer = getattr(torch.optim, kinds.get(name, "SGD"))(parameters, lr=0.1, foreach=together, **more)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        state = [item for own in optimizer.state.values() for item in own.values() if item is not None]
        with LiveBytes([parameters, [parameter.grad for parameter in parameters], state]) as live:
            optimizer.step()
    predicted = temporary_bytes(name, [4 * size for size in sizes], "cuda" if together else "cpu")
    assert predicted <= live.most <= predicted + 64  # numbers of the steps


def test_the_optimizers_are_those_whose_state_is_known() -> None:
    with pytest.raises(PlanError) as told:
        parameter_bytes((2, 3), torch.float32, "lion")
    known = str(told.value).removeprefix("optimizer is one of ").removesuffix(", not 'lion'")
    assert sorted(known.split(", ")) == sorted(OPTIMIZERS)

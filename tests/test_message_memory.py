"""What plans count for messages of gradients and weights, and for what the optimizer makes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopart.message_memory import Alike, arriving_bytes, message_bytes, single_bytes, staying_bytes
from autopart.passes.annotate import parameter_bytes
from autopart.runtime.buckets import BUCKET_BYTES, split_by_bytes
from autopart.runtime.data_weights import sent_ahead, summed_beside
from autopart.runtime.errors import PlanError
from autopart.solver.stages_passing import passing
from autopart.solver.stages_runs import Runs
from autopart.update_memory import OPTIMIZERS, temporary_bytes
from autopart.verify.live_bytes import LiveBytes

SMALL, LARGE = BUCKET_BYTES // 4, 8 * BUCKET_BYTES


def alike(level: int, *sizes: float, copied: Sequence[float] = (), limit: float = BUCKET_BYTES) -> Alike:
    """copied: of these sizes those that are not cut in their first dim. Each is read by itself."""
    apart = max((size for size in copied if size > limit), default=0.0)
    return Alike(level, sum(sizes), max(sizes), apart, max(sizes))


def held(parameters: Sequence[Alike], replicas: int, summed: float) -> float:
    """All step, and while a message is made."""
    stays = sum(staying_bytes(own.level, float(own.bytes), replicas, summed) for own in parameters)
    arriving = float(arriving_bytes(parameters, replicas, BUCKET_BYTES))
    return stays + max(float(message_bytes(parameters, replicas, summed, BUCKET_BYTES)), arriving)


@pytest.mark.parametrize(("level", "bytes_held"), [(0, SMALL), (1, SMALL + SMALL / 4), (2, 2.25 * SMALL), (3, 0.0)])
def test_one_message(level: int, bytes_held: float) -> None:
    assert held([alike(level, SMALL / 2, SMALL / 2)], 4, 1.0) == bytes_held


def test_many_messages() -> None:
    """One that is made beside those on their way, five at level 2; level 1 keeps what arrives."""
    sizes = [SMALL] * 100
    assert held([alike(0, *sizes)], 4, 1.0) == BUCKET_BYTES
    assert held([alike(1, *sizes)], 4, 1.0) == BUCKET_BYTES + 25 * SMALL
    assert held([alike(2, *sizes)], 4, 1.0) == (1 + 1.25 * 5) * BUCKET_BYTES
    for copied in ([], [LARGE]):  # which is less than what follows
        most = BUCKET_BYTES + 1.25 * (LARGE + 4 * BUCKET_BYTES)
        assert held([alike(2, LARGE, *sizes, copied=copied)], 4, 1.0) == most
        assert held([alike(2, LARGE, LARGE, *sizes, copied=copied)], 4, 1.0) == most
    assert held([alike(0, LARGE, *sizes), alike(2, *sizes)], 4, 1.0) == 7.25 * BUCKET_BYTES


def test_a_large_tensor_is_its_own_message() -> None:
    """No copy of its gradient, beside smaller messages, which follow it while it is on its way."""
    sizes = [SMALL] * 100
    assert held([alike(1, LARGE, *sizes)], 4, 1.0) == BUCKET_BYTES + (LARGE + 100 * SMALL) / 4
    assert single_bytes(1, LARGE, True, 1.0, BUCKET_BYTES) == single_bytes(0, LARGE, False, 1.0, BUCKET_BYTES) == 0.0
    assert single_bytes(1, LARGE, False, 1.0, BUCKET_BYTES) == LARGE, "a copy beside it"
    assert single_bytes(1, LARGE, False, 2.0, BUCKET_BYTES) == 3 * LARGE, "and what it is converted to"
    assert held([alike(2, LARGE)], 4, 1.0) == 1.25 * LARGE, "that of the microbatch before is on its way"
    assert held([alike(2, LARGE, *sizes)], 4, 1.0) == 1.25 * (LARGE + 4 * BUCKET_BYTES) + BUCKET_BYTES


@pytest.mark.parametrize("seed", range(200))
def test_no_message_takes_more(seed: int) -> None:
    """Of messages as the runtime fills them, each made beside those before it, the first beside the last.

    At level 2 beside an op that takes as much as the largest gradient, be it another one than that which makes it.
    """
    rng = random.Random(seed)
    limit, replicas, summed = rng.choice([SMALL, BUCKET_BYTES]), rng.choice([2, 4, 16]), rng.choice([0.5, 1.0, 2.0])
    sizes = [SMALL / 3, SMALL, 2 * SMALL, LARGE / 2, LARGE]
    count = rng.randint(1, 6)
    tensors = [(rng.choices(sizes, [5, 5, 2, 1, 1])[0], rng.random() < 0.7) for _ in range(count)]
    runs = split_by_bytes([((size, first), size) for size, first in tensors], limit)
    copied = [size for size, first in tensors if not first]
    messages = [([size for size, _ in run], len(run) == 1 and run[0][1]) for run in runs]
    for level in (1, 2):
        own = alike(level, *(size for size, _ in tensors), copied=copied, limit=limit)
        most = float(message_bytes([own], replicas, summed, limit))
        flying = list[float]()
        for microbatch, (at, (gradients, alone)) in itertools.product(range(2), enumerate(messages)):
            size = sum(gradients)
            beside = (0.0 if alone else size) + (summed * size if summed != 1.0 else 0.0)
            if level == 1:
                made = single_bytes(level, size, alone, summed, limit) if len(gradients) == 1 else 0.0
                assert beside <= max(most, made) * (1 + 1e-9), (microbatch, at)
                continue
            coming = summed * (1 + 1 / replicas)
            held = [coming * sum(flying) + size - gradients[-1]]
            flying = flying if at else []
            while flying and not summed_beside([summed * other for other in flying], summed * size, limit):
                flying.pop(0)
            held.append(size + beside - gradients[-1] + coming * sum(flying))
            flying.append(size)
            held.append(coming * sum(flying))
            assert max(held) <= most * (1 + 1e-9), (microbatch, at)


@pytest.mark.parametrize("seed", range(100))
def test_no_more_weights_arrive(seed: int) -> None:
    """Than are counted: of layers that read several messages, and messages that several layers read."""
    rng = random.Random(seed)
    limit, replicas = rng.choice([SMALL, BUCKET_BYTES]), rng.choice([2, 16, 1024])
    sizes = [SMALL / 3, SMALL, 2 * SMALL, LARGE / 2, LARGE]
    layers = [rng.choices(sizes, [5, 5, 2, 1, 1], k=rng.randint(1, 6)) for _ in range(rng.randint(1, 5))]
    parameters = [(number, size) for number, own in enumerate(layers) for size in own]
    runs = split_by_bytes([(item, item[1]) for item in parameters], limit)
    read = max(map(sum, layers))
    waiting, flying, most = list(range(len(runs))), dict[int, float](), 0.0

    def send() -> None:
        nonlocal most
        while waiting and sent_ahead([*flying.values()], sum(s for _, s in runs[waiting[0]]), read + limit):
            first = waiting.pop(0)
            flying[first] = sum(size for _, size in runs[first])
        most = max(most, sum(flying.values()))

    send()
    for number in range(len(layers)):
        for at in [at for at, run in enumerate(runs) if any(layer == number for layer, _ in run)]:
            assert number == 0 or at not in waiting, "on its way before the layer runs"
            if at in waiting:
                waiting.remove(at)
            elif flying.pop(at, 0.0):
                send()
    for level in (1, 2):
        own = replace(alike(level, *(size for _, size in parameters), limit=limit), read=read)
        there = own.bytes / (1 if level == 1 else replicas)  # gradients that come later
        assert most * (1 + 1 / replicas) - there <= float(arriving_bytes([own], replicas, limit)) * (1 + 1e-9)


def test_a_layer_reads_what_all_its_blocks_do() -> None:
    """Also beside other stages: of blocks of two layers and one that lies in none."""
    sent: list[tuple[tuple[int, ...], str, int, float, bool]] = [
        ((block,), "kind", 2, float(size), True) for block, size in enumerate([7, 1, 2, 3, 4])
    ]
    sent.append(((1, 3), "kind", 2, 10.0, True))
    found = passing(sent, [], 2, 1.0, False, 1.0, ["", "one", "one", "two", "two"])
    ((_, groups),) = found.sent
    assert {group.blocks: group.read for group in groups} == {
        (0,): 7.0, (1,): 13.0, (2,): 13.0, (3,): 17.0, (4,): 17.0, (1, 3): 17.0
    }  # fmt: skip


def test_sums_in_another_type() -> None:
    """Twice as wide: converted messages, which stay until the end of the step where the last microbatch makes them."""
    sizes = [SMALL] * 100
    assert held([alike(0, *sizes)], 4, 2.0) == 100 * SMALL + 3 * BUCKET_BYTES
    assert held([alike(1, *sizes)], 4, 2.0) == 150 * SMALL + 3 * BUCKET_BYTES
    assert held([alike(2, *sizes)], 4, 2.0) == 9.0 * BUCKET_BYTES
    assert held([alike(0, *sizes)], 4, 0.5) == 1.5 * BUCKET_BYTES


def test_weights_arrive_before_there_are_gradients() -> None:
    """Of level 2, whose shares of gradients are small, what a layer reads and its parts are more."""
    assert held([alike(2, LARGE, copied=[LARGE])], 64, 1.0) == pytest.approx(LARGE * (1 + 1 / 64))
    assert held([alike(1, LARGE)], 2, 1.0) == LARGE
    one_layer = replace(alike(2, LARGE, LARGE, LARGE), read=3.0 * LARGE)
    assert held([one_layer], 64, 1.0) == pytest.approx(LARGE * 3)


@pytest.mark.parametrize("seed", range(20))
def test_stages_have_what_their_own_parameters_take(seed: int) -> None:
    """Of all runs of blocks at once as of one after the other, and as of the parameters themselves."""
    rng, count = random.Random(seed), 7
    sizes = [SMALL / 3, SMALL, 2 * SMALL, LARGE]
    parameters = [
        (
            tuple(sorted(rng.sample(range(count), rng.choice([1, 1, 2])))),
            rng.choice(sizes),
            rng.randint(0, 2),
            rng.random() < 0.5,
        )
        for _ in range(12)
    ]
    apart, summed, limit = rng.random() < 0.5, rng.choice([0.5, 1.0, 2.0]), rng.choice([SMALL, BUCKET_BYTES])
    lingering = {1: LARGE, 2: SMALL, 4: 0.0, 5: SMALL}  # with which of these a stage begins
    found = passing(
        [(blocks, level, level, size, first) for blocks, size, level, first in parameters],
        [(blocks, size) for blocks, size, *_ in parameters],
        4,
        summed,
        apart,
        limit,
        waiting=[(blocks, size) for blocks, size, level, _ in parameters if level == 2 and len(blocks) > 1],
        lingering=lingering,
    )
    member = np.array([[block < end for block in range(count)] for end in range(count + 1)])
    runs = Runs.of(member)
    messages, updates = found.messages_of(member, runs), found.updates_of(member, runs)
    for number, (first, last) in enumerate(zip(runs.first, runs.last, strict=True)):
        inside = set(range(first, last))
        own = [item for item in parameters if inside & set(item[0])]
        by_level = [[item for item in own if item[2] == level] for level in (0, 1, 2)]
        exact = [
            alike(level, *(item[1] for item in some), copied=[item[1] for item in some if not item[3]], limit=limit)
            for level, some in enumerate(by_level)
            if some
        ]
        waits = sum(item[1] for item in own if item[2] == 2 and len(inside & set(item[0])) > 1)
        assert messages[number] == pytest.approx(found.message_bytes(inside))
        most = max(float(message_bytes(exact, 4, summed, limit)), float(arriving_bytes(exact, 4, limit)))
        most += waits + lingering.get(min(inside & {*lingering}, default=0), 0.0)
        assert messages[number] >= most * (1 - 1e-9)
        if inside == set(range(count)):
            assert messages[number] == pytest.approx(most)
        made = (max if apart else sum)([0.0, *(item[1] for item in own)])
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


def test_whole_weights_arrive_while_a_forward_runs() -> None:
    """In the room of what an op takes in its backward alone; messages of gradients are beside that."""
    sent = [((block,), "kind", 1, float(LARGE), True) for block in range(2)]
    found = passing(sent, [], 4, 1.0, False, BUCKET_BYTES)
    arriving = 2 * LARGE / 4  # what is put together from all replicas' shares, in place of gradients
    assert found.message_bytes({0, 1}) == arriving
    short = replace(found, transients=((float(SMALL), 2.0 * SMALL), (SMALL / 2, SMALL / 2)))
    assert short.message_bytes({0, 1}) == arriving - SMALL
    assert short.message_bytes({1}) == arriving / 2
    long = replace(found, transients=((0.0, float(LARGE)), (0.0, 0.0)))
    made = float(message_bytes([alike(1, LARGE, LARGE)], 4, 1.0, BUCKET_BYTES))
    assert long.message_bytes({0, 1}) == made < arriving
    member = np.array([[False, False], [True, False], [True, True]])
    runs = Runs.of(member)
    by_run = short.messages_of(member, runs)
    inside = [(first, last) for first, last in zip(runs.first, runs.last, strict=True)]
    assert by_run[inside.index((0, 2))] == arriving - SMALL and by_run[inside.index((1, 2))] == arriving / 2

"""Sums of gradients that the last backward hides: the formula, the order of the runtime, and what plans credit."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.analysis import Analysis, analyze
from autopart.bucket_size import MOST_BYTES, UNIT, bucket_bytes
from autopart.candidates import Candidates
from autopart.cost.communication import collective_seconds
from autopart.cost.devices import Link
from autopart.planner import make_plan
from autopart.predict import simulate_plan
from autopart.realize import emit
from autopart.runtime import gradients
from autopart.runtime.buckets import BUCKET_BYTES, messages_of
from autopart.solver.degrees import Degrees
from autopart.solver.overlap import GradientSum, hidden_seconds, late_between
from autopart.solver.stages_runs import Runs
from autopart.step_time import step_end_seconds
from autopart.tracing import capture
from clusters import ideal
from launch import launch

WIDTH, LAYERS, BATCH = 2048, 6, 64
CONFIG = Degrees(1, 2, (), 2, "1f1b", "none")
UNITS = [((block,), 4.0) for block in range(3)]  # three blocks with a backward of 4 seconds each


@pytest.mark.parametrize(
    ("seconds", "limit", "hidden"),
    [
        (3.0, 1.0, 6.0),  # sent at 4, 8 and 12, when the backward is over: that of the first block is in sight
        (3.0, 2.0, 4.0),  # two together at 8, through at 14, then the third
        (3.0, 9.0, 0.0),  # all at 12
        (10.0, 1.0, 8.0),  # one after the other from 4 on: the backward hides what it takes after that
        (0.0, 1.0, 0.0),
    ],
)
def test_messages_follow_the_backward_and_each_other(seconds: float, limit: float, hidden: float) -> None:
    sums = [GradientSum((block,), 1.0, seconds) for block in (2, 1, 0)]
    assert hidden_seconds(sums, UNITS, limit) == pytest.approx(hidden)


def test_a_message_waits_for_those_before_it() -> None:
    first, last = GradientSum((0,), 1.0, 1.0), GradientSum((2,), 1.0, 1.0)
    assert hidden_seconds([last, first], UNITS, 1.0) == pytest.approx(1.0)
    assert hidden_seconds([first, last], UNITS, 1.0) == 0.0, "the model's last parameter is made last"
    # of several blocks: when the first of them in the stage is done
    assert hidden_seconds([GradientSum((2, 0), 1.0, 1.0)], UNITS, 1.0) == 0.0
    assert hidden_seconds([GradientSum((2, 0), 1.0, 1.0)], UNITS[1:], 1.0) == pytest.approx(1.0)
    # unlike kinds have messages of their own, sent in the order of their last gradients
    kinds = [GradientSum((2,), 1.0, 1.0, "a"), GradientSum((1,), 1.0, 1.0, "b"), GradientSum((0,), 1.0, 1.0, "a")]
    assert hidden_seconds(kinds, UNITS, 9.0) == pytest.approx(1.0)


def test_a_message_takes_time_besides_its_bytes() -> None:
    sums = [GradientSum((block,), 1.0, 3.0, call_s=0.5) for block in (2, 1, 0)]
    assert hidden_seconds(sums, UNITS, 1.0) == pytest.approx(5.5)  # the last one leaves with the end, 0.5 + 3.0
    assert hidden_seconds(sums, UNITS, 9.0) == pytest.approx(-0.5)  # all leave with it


@pytest.mark.parametrize("seed", range(20))
def test_what_passes_the_backward_at_least_is_what_does_where_each_gradient_goes_by_itself(seed: int) -> None:
    """Of every run of blocks; in larger messages, or another order, more passes."""
    rng = random.Random(seed)
    count = rng.randint(1, 7)
    backwards = [rng.random() for _ in range(count)]
    blocks = [(block,) for block in range(count)] + [
        tuple(sorted(rng.sample(range(count), rng.randint(2, count)))) for _ in range(2 if count > 1 else 0)
    ]
    sums = [GradientSum(own, 1.0, 2 * rng.random()) for own in blocks if rng.random() < 0.8]
    member = np.tri(count + 1, count, -1, dtype=bool)
    runs = Runs.of(member)
    late = late_between(sums, member, runs, backwards)
    for first, last, least in zip(runs.first.tolist(), runs.last.tolist(), late.tolist(), strict=True):
        units = [((block,), backwards[block]) for block in range(first, last)]
        # as they are made: the last blocks first
        own = [item for item in sums if any(first <= block < last for block in item.blocks)]
        own.sort(key=lambda item: -min(block for block in item.blocks if block >= first))
        total = sum(item.seconds for item in own)
        assert total - hidden_seconds(own, units, 1.0) == pytest.approx(least)
        rng.shuffle(own)
        assert total - hidden_seconds(own, units, rng.choice([1.0, 2.0, 9.0])) >= least * (1 - 1e-9)
    apart = np.array([[False, False], [False, True], [True, True]])
    assert not late_between([GradientSum((0,), 1.0, 1.0)], apart, Runs.of(apart), [0.0, 0.0]).any(), "no row"


def test_small_models_and_slow_networks_have_smaller_messages() -> None:
    """As many as make the sum of their own times and of the last one's bytes the least."""
    slow, fast = Link("slow", 1e9, 1e-4), Link("fast", 1e10, 1e-5)
    for link in (slow, fast):
        for held in (1e7, 1e8, 1e9):
            chosen = bucket_bytes(held, 1.0, 4, link)
            call = collective_seconds("all_reduce", 0, 4, link)
            whole = collective_seconds("all_reduce", held, 4, link) - call

            def exposed(size: float, call: float = call, whole: float = whole, all_of: float = held) -> float:
                return call * all_of / size + whole * size / all_of

            others = range(UNIT, MOST_BYTES + 1, UNIT)
            assert chosen % UNIT == 0 and exposed(chosen) <= min(map(exposed, others)) * 1.15
    assert bucket_bytes(1e8, 1.0, 1, slow) == bucket_bytes(0.0, 1.0, 4, slow) == BUCKET_BYTES
    assert bucket_bytes(1e12, 1.0, 4, fast) == MOST_BYTES
    assert bucket_bytes(1e8, 2.0, 4, slow) < bucket_bytes(1e8, 1.0, 4, slow), "twice the bytes to send"


class Layers(nn.Module):
    """Linear layers, registered in the order of their use or in the opposite one."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        order = range(LAYERS)[::-1] if backwards else range(LAYERS)
        for index in order:
            setattr(self, f"layer_{index}", nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(LAYERS):
            x = torch.tanh(getattr(self, f"layer_{index}")(x))
        return x.square().mean()


@functools.cache
def layers(backwards: bool) -> Analysis:
    with torch.device("meta"):
        return analyze(capture(Layers(backwards), (torch.empty(BATCH, WIDTH),), check_eval=False))


@pytest.mark.parametrize("backwards", [False, True])
def test_plans_credit_the_order_that_is_emitted(backwards: bool) -> None:
    analysis, cluster = layers(backwards), ideal(2, bandwidth=1e11)
    plan = make_plan(
        analysis.program, cluster, batch=BATCH, analysis=analysis, pp=1, dp=2, tp=1, microbatches=2, zero=0
    )
    candidates = Candidates(analysis, cluster, BATCH, "adamw")
    answer = candidates.evaluate(CONFIG).answer
    (step,) = answer.cut.way
    problem = answer.problem
    hidden = problem.step_end_seconds(step) - problem.exposed_step_end_seconds(step)
    assert plan.stages[0].step_end_s == pytest.approx(problem.exposed_step_end_seconds(step))
    assert plan.step_time_s == simulate_plan(plan).makespan_s and plan.gap == pytest.approx(0.0, abs=1e-6)
    size = 4 * WIDTH * (WIDTH + 1)
    data = candidates.setting(CONFIG).data
    in_full, call = data.sum_seconds(size, 0), data.call_seconds(0)
    # a message takes little besides its bytes here, so they are small: each layer's weight has its own, and its bias
    assert plan.bucket_bytes < size < BUCKET_BYTES
    assert hidden == pytest.approx(0.0 if backwards else (LAYERS - 1) * in_full, abs=2 * LAYERS * call)
    assert 0 < 2 * LAYERS * call < in_full / 2
    assert step_end_seconds(problem, step, "2bw", 0.0) == problem.step_end_seconds(step), "no end of the batch"
    whole = step_end_seconds(problem, step, "1f1b", 0.0)
    assert whole == step_end_seconds(problem, step, "interleaved", 0.0) == step_end_seconds(problem, step, "zb-h1", 0.0)
    parts = [step_end_seconds(problem, step, "zb-h1", share) for share in (1e-6, 0.25, 0.5)]  # W hides less than all
    assert parts[0] == pytest.approx(problem.step_end_seconds(step), abs=2 * LAYERS * call)
    assert parts == sorted(parts, reverse=True) and parts[-1] >= whole


def test_no_configuration_is_faster_than_its_cheap_bound() -> None:
    """Backwards beside sums of all lengths; tensor axes, several stages, levels of ZeRO."""
    for bandwidth, zero in [(1e7, 0), (1e9, 0), (1e9, 1), (1e11, 0)]:
        candidates = Candidates(layers(False), ideal(4, bandwidth=bandwidth), BATCH, "adamw", zero=zero)
        for pp, dp, axes in [(1, 4, ()), (1, 2, (2,)), (1, 1, (4,)), (2, 2, ())]:
            for microbatches in (1, 2):
                config = Degrees(pp, dp, axes, microbatches, "1f1b", "none")
                assert candidates.lower_bound(config) <= candidates.evaluate(config).objective * (1 + 1e-9)


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual"),
    [("zb-h1", 1, 1), ("zb-h1", 2, 1), ("zb-v", 2, 2), ("interleaved", 2, 2), ("2bw", 2, 1)],
)
def test_bounds_where_other_backwards_hide_sums(schedule: str, pp: int, virtual: int) -> None:
    """The cheap bound, and the best there is; of one stage sums are all of it that is not work."""
    for bandwidth, zero in [(1e7, 0), (1e9, 0), (1e9, None), (1e9, 3), (1e11, 1)]:
        if zero and schedule == "2bw":
            continue
        candidates = Candidates(layers(False), ideal(4, bandwidth=bandwidth), BATCH, "adamw", zero=zero)
        for microbatches in (2, 4):
            config = Degrees(pp, 4 // pp, (), microbatches, schedule, "none", virtual)
            found = candidates.evaluate(config)
            seconds = found.objective * (1 + 1e-9)
            assert found.bound <= seconds
            assert candidates.lower_bound(config) <= seconds
            assert candidates.last_floor(config, math.inf) <= seconds


LIMIT = 700  # bytes of a message: one of the layers or two


class Words(nn.Module):
    """An output layer tied to the embedding, and layers with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


def _events(directory: str, limit: int = LIMIT) -> list[tuple[str, Any]]:
    """In which order a step makes gradients, by name, and starts sums, by bytes."""
    found: list[tuple[str, Any]] = []
    names: dict[int, str] = {}
    module: Any = gradients
    arrived, started = module.GradientSums._arrived, module.sum_message

    @functools.wraps(arrived)  # hooks of other modules rest
    def note_gradient(sums: gradients.GradientSums, leaf: Tensor) -> None:
        found.append(("made", names[id(leaf)]))
        arrived(sums, leaf)

    def note_sum(message: Tensor, *rest: Any) -> Any:
        found.append(("sent", message.nbytes))
        return started(message, *rest)

    module.GradientSums._arrived, module.sum_message = note_gradient, note_sum
    try:
        model = autopart.load(directory, Words(), bucket_bytes=limit)
        names.update({id(parameter): name for name, parameter in model.named_parameters()})
        model(torch.arange(16).view(4, 4))
    finally:
        module.GradientSums._arrived, module.sum_message = arrived, started
    return found


def test_the_runtime_sends_in_this_order(tmp_path: Path) -> None:
    """Blocks make gradients from the last to the first, and each message leaves with the last of its gradients."""
    program = capture(Words(), (torch.zeros(4, 4, dtype=torch.long),), check_eval=False)
    analysis, cluster = analyze(program), ideal(2)
    plan = make_plan(
        program, cluster, batch=4, analysis=analysis, pp=1, dp=2, tp=1, microbatches=1, recompute="none", zero=0
    )
    emit(program, plan, tmp_path)
    candidates = Candidates(analysis, cluster, 4, "adamw")
    sums = candidates.evaluate(replace(CONFIG, microbatches=1)).answer.problem.shapes[0].sums
    messages = [message for message, _ in messages_of([(item, item.kind, item.bytes) for item in sums], LIMIT)]
    block_of = {node.meta["name"]: min(found) for node, found in candidates.readers.items()}
    assert len(messages) > 3 and len({item.blocks for item in sums}) > 6
    for events in launch(_events, 2, str(tmp_path)):
        sizes = [size for event, size in events if event == "sent"]
        assert sizes == [sum(item.bytes for item in message) for message in messages]
        made: list[int] = []
        left = list(messages)
        for event, what in events:
            if event == "made":
                made.append(block_of[what])
            else:
                assert made[-1] == min(min(item.blocks) for item in left.pop(0)), "sent by its last gradient's block"
        assert made == sorted(made, reverse=True)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_other_backwards_send_as_gradients_are_made(schedule: str, tmp_path: Path) -> None:
    """In the last W, or the last backward of a stage, before it is over."""
    program = capture(Words(), (torch.zeros(4, 4, dtype=torch.long),), check_eval=False)
    limits: dict[str, Any] = {"pp": 2, "dp": 2, "tp": 1, "microbatches": 2, "recompute": "none", "zero": 0}
    plan = make_plan(program, ideal(4), batch=4, schedule=schedule, **limits)
    emit(program, plan, tmp_path)
    for events in launch(_events, 4, str(tmp_path), LIMIT // 4):
        kinds = [event for event, _ in events]
        last = len(kinds) - kinds[::-1].index("made") - 1
        assert kinds[:last].count("sent") >= 2, kinds

"""Stages with unlike meshes: what crosses is cut into overlapping pieces, and training equals the single process."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import autopart.verify
import branching
from autopart.analysis import Analysis, analyze
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.placement import REPLICATE, Placement, shard, take_share
from autopart.runtime.resharding import Message, Side, backward_messages, forward_messages, local_shape
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from launch import run_kept_job

# --- Pieces ---

SHAPE = ("b", 4, 6)
BATCH = 8


def side(first: int, samples: tuple[int, ...], *axes: tuple[Placement, int]) -> Side:
    sizes = tuple(size for _, size in axes)
    count = len(samples) * math.prod(sizes)
    return Side(tuple(range(first, first + count)), samples, sizes, tuple(placement for placement, _ in axes))


SIDES = {
    "one": side(0, (8,)),
    "dp2": side(0, (4, 4)),
    "dp3:1": side(0, (6, 2)),
    "dp4": side(0, (2,) * 4),
    "tp2": side(0, (8,), (REPLICATE, 2)),
    "tp2 split": side(0, (8,), (shard(1), 2)),
    "tp2 blocks": side(0, (8,), (shard(2, 3), 2)),
    "tp3 split": side(0, (8,), (shard(2), 3)),
    "dp2 tp2": side(0, (4, 4), (shard(2), 2)),
    "dp2 2x2": side(0, (4, 4), (shard(1), 2), (REPLICATE, 2)),
}


def moved(found: Side, by: int) -> Side:
    return replace(found, ranks=tuple(rank + by for rank in found.ranks))


def share_of(value: Tensor, found: Side, rank: int) -> Tensor:
    width = math.prod(found.sizes)
    replica, position = divmod(found.ranks.index(rank), width)
    start = sum(found.samples[:replica])
    coordinates = list(itertools.product(*map(range, found.sizes)))[position]
    return take_share(value[start : start + found.samples[replica]], found.placements, found.sizes, coordinates)


def carry(messages: tuple[Message, ...], have: dict[int, Tensor], target: Side) -> dict[int, Tensor]:
    made = {rank: torch.zeros(local_shape(SHAPE, target, rank), dtype=torch.float64) for rank in target.ranks}
    for message in messages:
        made[message.target][message.put] += have[message.source][message.take]
    return made


@pytest.mark.parametrize("target", SIDES)
@pytest.mark.parametrize("source", SIDES)
def test_pieces_make_every_share(source: str, target: str) -> None:
    """Forward and back, and no element is sent twice to one rank."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    value = torch.arange(8 * 4 * 6, dtype=torch.float64).reshape(8, 4, 6) + 1
    messages = forward_messages(SHAPE, 0, here, there)
    made = carry(messages, {rank: share_of(value, here, rank) for rank in here.ranks}, there)
    for rank in there.ranks:
        assert torch.equal(made[rank], share_of(value, there, rank))
        assert sum(math.prod(m.shape) for m in messages if m.target == rank) == made[rank].numel()
    back = carry(backward_messages(SHAPE, 0, here, there), made, here)
    assert all(torch.equal(back[rank], share_of(value, here, rank)) for rank in here.ranks)


@pytest.mark.parametrize("target", ["one", "dp2", "dp4", "dp2 tp2"])
@pytest.mark.parametrize("source", ["one", "dp2", "tp2 split", "dp4"])
def test_gradients_of_what_has_no_samples_add_up(source: str, target: str) -> None:
    """Each replica has a part of the gradient; the copies' gradients add up to the sum of all parts."""
    here, there = SIDES[source], moved(SIDES[target], 100)
    shape = (4, 6)
    parts = torch.arange(len(there.samples) * 24, dtype=torch.float64).reshape(len(there.samples), 4, 6) + 1
    width = math.prod(there.sizes)
    inner = replace(there, placements=tuple(_lower(p) for p in there.placements))
    outer = replace(here, placements=tuple(_lower(p) for p in here.placements))

    def cut(value: Tensor, found: Side, position: int) -> Tensor:
        coordinates = list(itertools.product(*map(range, found.sizes)))[position % math.prod(found.sizes)]
        return take_share(value, found.placements, found.sizes, coordinates)

    have = {rank: cut(parts[index // width], inner, index) for index, rank in enumerate(inner.ranks)}
    made = {rank: torch.zeros(local_shape(shape, outer, rank), dtype=torch.float64) for rank in outer.ranks}
    for message in backward_messages(shape, None, outer, inner):
        made[message.target][message.put] += have[message.source][message.take]
    own = math.prod(outer.sizes)
    for position in range(own):
        total = sum(made[rank] for index, rank in enumerate(outer.ranks) if index % own == position)
        assert torch.equal(total, cut(parts.sum(0), outer, position))


def _lower(placement: Placement) -> Placement:
    return shard(placement.dim - 1, placement.outer) if placement.is_shard else placement


# --- Training ---

Mesh = tuple[int, int]  # replicas, tensor ranks
MODELS = ("gpt2", "unet")
CASES: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...]]] = {
    "dp2-1": (((2, 1), (1, 1)), ()),
    "1-dp2": (((1, 1), (2, 1)), ()),
    "tp2-1": (((1, 2), (1, 1)), ()),
    "1-tp2": (((1, 1), (1, 2)), ()),
    "dp2-tp2": (((2, 1), (1, 2)), ()),
    "dp2-1-1": (((2, 1), (1, 1), (1, 1)), ()),
    "1-dp2-1": (((1, 1), (2, 1), (1, 1)), ()),
    "shares 3:1": (((2, 1), (1, 1)), (3, 1)),
}


@functools.lru_cache(maxsize=4)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    if name == "gpt2":
        item = family(name)
        subject = prepare(item.build(), (), item.inputs(item.batch))
    else:
        model, batch = getattr(branching, name)()
        subject = prepare(model, (), batch)
    return subject, analyze(subject.program)


@functools.lru_cache(maxsize=8)
def chain_of(name: str, stages: int) -> Plan:
    subject, analysis = subject_of(name)
    limits = {"pp": stages, "dp": 1, "tp": 1, "microbatches": 2, "recompute": "none", "batch": 8}
    return make_plan(subject.program, ideal(stages), analysis=analysis, **limits)


@functools.lru_cache(maxsize=2)
def tensor_plan(name: str) -> Plan:
    subject, analysis = subject_of(name)
    return make_plan(subject.program, ideal(2), pp=1, dp=1, tp=2, microbatches=2, batch=8, analysis=analysis)


def with_meshes(name: str, meshes: tuple[Mesh, ...], shares: tuple[int, ...] = ()) -> Plan:
    """A chain of stages on these meshes; the first stage's replicas have these parts."""
    plan = chain_of(name, len(meshes))
    stages: list[StagePlan] = []
    first = 0
    for index, (stage, (dp, tp)) in enumerate(zip(plan.stages, meshes, strict=True)):
        sharded = tensor_plan(name) if tp > 1 else None
        stages.append(
            replace(
                stage,
                devices=tuple(range(first, first + dp * tp)),
                mesh=(("dp", dp), ("tp", tp)),
                shares=() if index else shares,
                strategies=sharded.strategies if sharded else {},
                storage=sharded.storage if sharded else {},
            )
        )
        first += dp * tp
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_equal(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    plan = with_meshes(name, *CASES[case])
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject)
    worst = sorted(result.groups, key=lambda group: -max(group.gradient or 0.0, group.parameter))[:3]
    assert result.equal, f"{result.loss_difference=} {worst}"

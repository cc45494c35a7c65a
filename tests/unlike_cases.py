"""Plans whose stages have unlike meshes, for tests: chains of stages laid on given meshes."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from chains import chain_of, subject_of

from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.realize import realize
from clusters import ideal

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


@functools.lru_cache(maxsize=2)
def tensor_plan(name: str) -> Plan:
    subject, analysis = subject_of(name)
    return make_plan(subject.program, ideal(2), pp=1, dp=1, tp=2, microbatches=2, batch=8, analysis=analysis)


def with_meshes(
    name: str,
    meshes: tuple[Mesh, ...],
    shares: tuple[int, ...] = (),
    places: tuple[int, ...] = (),
    schedule: str = "1f1b",
) -> Plan:
    """A chain of stages on these meshes; see :func:`laid_on`."""
    plan = chain_of(name, len(places or meshes), microbatches=2)
    sharded = tensor_plan(name) if any(tp > 1 for _, tp in meshes) else None
    return laid_on(plan, meshes, shares, places, schedule, sharded)


def laid_on(
    plan: Plan,
    meshes: tuple[Mesh, ...],
    shares: tuple[int, ...] = (),
    places: tuple[int, ...] = (),
    schedule: str = "1f1b",
    sharded: Plan | None = None,
) -> Plan:
    """A plan of one rank for each stage on these meshes; replicas of the pipeline's first rank have these parts.

    places: the rank of the pipeline of each stage, ``meshes`` by rank; empty: each stage has its own. sharded: has the
    strategies of tensor ranks.
    """
    places = places or tuple(range(len(meshes)))
    starts = list(itertools.accumulate((dp * tp for dp, tp in meshes), initial=0))
    stages: list[StagePlan] = []
    for stage, place in zip(plan.stages, places, strict=True):
        dp, tp = meshes[place]
        strategies = sharded if tp > 1 else None
        stages.append(
            replace(
                stage,
                devices=tuple(range(starts[place], starts[place + 1])),
                mesh=(("dp", dp), ("tp", tp)),
                shares=() if place else shares,
                strategies=strategies.strategies if strategies else {},
                storage=strategies.storage if strategies else {},
            )
        )
    return replace(plan, stages=tuple(stages), schedule=schedule, warmup=())


DIVIDED: dict[str, tuple[tuple[Mesh, ...], tuple[int, ...], tuple[int, ...], str]] = {
    "dp2-1": (((2, 1), (1, 1)), (3, 1), (), "1f1b"),
    "1-dp2": (((1, 1), (2, 1)), (), (), "1f1b"),
    "dp2-1-1": (((2, 1), (1, 1), (1, 1)), (), (), "1f1b"),
    "zb-h1 dp2-1": (((2, 1), (1, 1)), (), (), "zb-h1"),
    "interleaved dp2-1": (((2, 1), (1, 1)), (), (0, 1, 0, 1), "interleaved"),
}


def divided(name: str, case: str, level: int) -> Plan:
    """All parameters of one stage whose first size is even are divided between that stage's replicas."""
    subject, analysis = subject_of(name)
    plan = with_meshes(name, *DIVIDED[case])
    several = {s.name for s in realize(subject.program, plan, analysis).manifest.parameters if len(s.stages) > 1}
    can = [i.name for i in subject.program.parameters if i.name not in several and i.shape and i.shape[0] % 2 == 0]
    return replace(plan, zero=dict.fromkeys(can, level))

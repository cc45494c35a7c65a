"""Pipelines that several tests train: GPT-2, T5, a U-Net with skips, and branches of two inputs."""

from __future__ import annotations

import functools

import branching
from autopart.analysis import Analysis, analyze
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.verify import Subject, prepare
from clusters import ideal
from families import NAMES, family

MODELS = ("gpt2", "t5", "unet", "branches")


@functools.lru_cache(maxsize=16)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    if name in NAMES:
        item = family(name)
        subject = prepare(item.build(), (), item.inputs(item.batch))
    else:
        model, batch = getattr(branching, name)()
        subject = prepare(model, (), batch)
    return subject, analyze(subject.program)


@functools.lru_cache(maxsize=16)
def chain_of(name: str, stages: int, microbatches: int = 4) -> Plan:
    """A plan with one stage on each of as many devices, for a batch of eight."""
    subject, analysis = subject_of(name)
    limits = {"pp": stages, "dp": 1, "tp": 1, "microbatches": microbatches, "recompute": "none", "batch": 8}
    return make_plan(subject.program, ideal(stages), analysis=analysis, **limits)  # type: ignore[arg-type]

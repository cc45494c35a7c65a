"""A small GPT-2 with a plan for four devices, and a plan made up by hand, to be taken apart and compared."""

from __future__ import annotations

import functools
from typing import Any

from autopart.models import load_model
from autopart.passes.program import Program
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.tracing import capture
from clusters import ideal

MODEL = "hf:gpt2?n_layer=2&n_embd=32&n_head=4&vocab_size=96&n_positions=32&seq=16&batch=8"
CLUSTER = ideal(4, bandwidth=1e10)


@functools.lru_cache(maxsize=1)
def program() -> Program:
    loaded = load_model(MODEL, meta=True)
    return capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False)


@functools.lru_cache(maxsize=1)
def plan() -> Plan:
    limits: dict[str, Any] = {"pp": 2, "tp": 2, "microbatches": 2, "recompute": "none"}
    return make_plan(program(), CLUSTER, **limits)


def by_hand(**more: Any) -> Plan:
    stages = tuple(
        StagePlan(
            (2 * s, 2 * s + 1),
            (("dp", 1), ("tp", 2)),
            (s, s + 1),
            forward_s=1.0,
            backward_s=2.0 + s,
            memory_bytes=100,
            capacity_bytes=200 + s,
            parameters=2,
            collectives={"all_reduce": {"calls": 3, "bytes": 6 * 10**9}},
            step_end_s=0.5,
        )
        for s in range(2)
    )
    return Plan("x", "m", "4xV100-32GB", 4, "float32", "1f1b", 4, stages, step_time_s=20.0, **more)

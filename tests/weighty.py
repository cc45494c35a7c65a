"""A model whose layers weigh much beside what it keeps, for plans that memory decides."""

from __future__ import annotations

import functools

from autopart.analysis import Analysis, analyze
from autopart.models import load_model
from autopart.plan import Plan
from autopart.tracing import capture


@functools.lru_cache(maxsize=1)
def analysis() -> Analysis:
    loaded = load_model("hf:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=512&seq=128", meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def needed(plan: Plan) -> int:
    """Bytes of the smallest device that each stage fits on."""
    return max(stage.memory_bytes for stage in plan.stages)

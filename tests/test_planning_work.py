"""How much work planning does, counted: deeper models have more layers, not more that is unlike."""

from __future__ import annotations

import functools

import pytest

import autopart.recomputation
from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.models import load_model
from autopart.solver.search import Degrees
from autopart.tracing import capture
from clusters import ideal

SHALLOW, DEEP = 14, 20


@functools.lru_cache
def analysis_of(layers: int) -> Analysis:
    spec = f"hf:gpt2?n_layer={layers}&n_embd=64&n_head=4&vocab_size=128&n_positions=32&seq=32&batch=2"
    loaded = load_model(spec, meta=True)
    program = capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False, copy_layers=True)
    return analyze(program)


def test_ways_to_run_a_layer_are_found_once_for_layers_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    found = autopart.recomputation._ways
    calls: list[str] = []

    def counted(layer: str, *others: object) -> object:
        calls.append(layer)
        return found(layer, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(autopart.recomputation, "_ways", counted)
    counts = []
    for layers in (SHALLOW, DEEP):
        candidates = Candidates(analysis_of(layers), ideal(4), 4, "adamw", zero=None)
        config = Degrees(2, 1, (2,), 2, "1f1b")
        problem = candidates.problem(config, candidates.choose(config))
        assert len(problem.shapes[0].layers) == layers
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] and counts[0] < len(problem.blocks) ** 2

"""What surely fits with whole parameters, told from one sample's bytes, beside the stages that are counted in full."""

from __future__ import annotations

import functools

import pytest
import torch

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.runtime.schedule import in_flight
from autopart.solver.degrees import Degrees
from autopart.solver.stages_problem import Step
from autopart.tensor_choice import TensorChoice
from autopart.tracing import capture
from clusters import ideal
from families import family


@functools.cache
def analysis_of(name: str, reduce_dtype: str) -> Analysis:
    item = family(name)
    model = item.build().to(torch.bfloat16) if reduce_dtype else item.build()
    return analyze(capture(model, (), item.inputs(8), reduce_dtype=reduce_dtype, check_eval=False))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("reduce_dtype", ["", "float32"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral"])
def test_no_stage_holds_more(name: str, reduce_dtype: str, optimizer: str) -> None:
    """Not one that has all blocks, with nothing divided."""
    found = Candidates(analysis_of(name, reduce_dtype), ideal(8), 64, optimizer, zero=None)
    nothing = TensorChoice({}, {}, None)
    for pp, dp, tp in ((1, 8, 1), (1, 4, 2), (4, 2, 1), (2, 2, 2), (8, 1, 1)):
        for microbatches in (1, 2, 8):
            for schedule in ("1f1b", "gpipe") if pp > 1 else ("1f1b",):
                config = Degrees(pp, dp, (tp,) if tp > 1 else (), microbatches, schedule, "none")
                problem = found.problem(config, nothing)
                whole = Step(0, 0, len(problem.positions) - 1)
                held = max(problem.stage_bytes(stage, whole) for stage in range(pp))
                held += problem.most_crossing_bytes() - found.overhead_bytes
                flying = max(in_flight(schedule, pp, microbatches, found.warmup_of(config)))
                least, most = found.held_bytes(found.samples(config), flying)
                assert held <= most and least <= most, config

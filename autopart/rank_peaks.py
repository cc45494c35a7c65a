"""What a rank of a plan holds at most in a step, from the code that is emitted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopart.analysis import Analysis
from autopart.exchanges import specs_by_stage
from autopart.passes.annotate import parameter_bytes
from autopart.plan import Plan
from autopart.realize import axes_of, check_plan, settings_of, sharded
from autopart.runtime.buckets import tensor_bytes
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import ParameterSpec
from autopart.step_memory import step_peaks


@dataclass(frozen=True, slots=True)
class RankPeak:
    """Bytes of a rank of the pipeline, of the replica that is looked at.

    stages: that it runs. parameters: between steps, buffers left out. optimizer: its state. step: the most of
    gradients, activations, temporary tensors, gathered weights and messages at once (:mod:`autopart.step_memory`);
    update: of gradients and what the optimizer makes while it updates. planned: what the plan counts on, libraries
    included.
    """

    stages: tuple[int, ...]
    parameters: int
    optimizer: int
    step: int
    update: int
    planned: int

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + max(self.step, self.update)

    def to_json_object(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def rank_peaks(plan: Plan, analysis: Analysis, kind: str, samples: Sequence[int] | None = None) -> list[RankPeak]:
    """kind: of devices, "cuda" or "cpu". samples: of a microbatch on each stage's replica, by default the largest."""
    check_plan(analysis.program, analysis, plan)
    settings = settings_of(analysis, plan)
    found = sharded(analysis, plan, settings)
    specs = specs_by_stage(analysis, found, settings)
    peaks = []
    for place, step in enumerate(step_peaks(analysis, plan, found, kind, settings, samples)):
        stages = tuple(index for index, there in enumerate(plan.places) if there == place)
        parameters, optimizer = _held(specs[stages[0]], stages, plan)
        planned = sum(plan.stages[index].memory_bytes for index in stages)
        peaks.append(RankPeak(stages, parameters, optimizer, round(step.call), round(step.update), planned))
    return peaks


def _held(specs: Sequence[ParameterSpec], stages: Sequence[int], plan: Plan) -> tuple[int, int]:
    """Bytes of the parameters of some stages, once each, and of their optimizer state."""
    stage, parameters, optimizer = plan.stages[stages[0]], 0, 0
    sizes = [size for _, size in axes_of(stage)]
    for spec in specs:
        if not set(stages).isdisjoint(spec.stages):
            whole = tensor_bytes(spec, sizes)
            share = whole // (stage.dp if spec.zero else 1)
            parameters += share if spec.zero == 3 else whole
            if spec.trainable:
                dtype = dtype_of(spec.dtype)
                optimizer += parameter_bytes((share // dtype.itemsize,), dtype, plan.optimizer).optimizer
    return parameters, optimizer

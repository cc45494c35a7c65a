"""What a verification found: errors per parameter group and traffic per stage, from what the ranks report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopart.analysis import pattern_of
from autopart.precision import in_float64
from autopart.runtime.manifest import Manifest
from autopart.verify.errors import VerifyError
from autopart.verify.reference import Reference

if TYPE_CHECKING:
    from autopart.plan import Plan

_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """Largest errors among the tensors of one name, layer numbers as ``*``; gradient None for buffers."""

    group: str
    tensors: int
    gradient: float | None
    parameter: float


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """Collectives of a stage in one step, by kind (calls, bytes) of one rank.

    Those of all its microbatches inside the stage, and those for its parameters at the end, also between stages.

    stages: several where ranks run several, which are counted together.
    """

    stages: tuple[int, ...]
    counted: Mapping[str, tuple[int, int]]
    planned: Mapping[str, tuple[int, int]] | None

    @property
    def as_planned(self) -> bool | None:
        return None if self.planned is None else dict(self.counted) == dict(self.planned)


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. losses: of each step, of the parallel program; reference_losses: of the plain model.

    loss_difference, gradient_difference, parameter_difference: the largest relative errors, see the module. traffic:
    of each stage (its planned part is None where no plan was given).
    """

    equal: bool
    tolerance: float
    ranks: int
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    loss_difference: float
    gradient_difference: float
    parameter_difference: float
    groups: tuple[GroupDifference, ...]
    traffic: tuple[StageTraffic, ...]
    notes: tuple[str, ...] = ()

    def to_json_object(self) -> dict[str, Any]:
        """What the command line prints with ``--json``; infinite differences as the string "inf"."""
        data = asdict(self)
        data["steps"] = len(self.losses)
        for item, stage in zip(data["traffic"], self.traffic, strict=True):
            item["as_planned"] = stage.as_planned
            for part in ("counted", "planned"):
                if item[part] is not None:
                    item[part] = {kind: {"calls": n, "bytes": size} for kind, (n, size) in item[part].items()}
        return {key: _finite(value) for key, value in data.items()}


def measure(
    manifest: Manifest,
    notes: Sequence[str],
    plan: Plan | None,
    reference: Reference,
    ranks: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> Verification:
    """Puts together what all ranks report, against the reference. plan: what traffic is held against, if anything."""
    gradients = _errors([rank["gradients"] for rank in ranks], reference.gradients)
    state = _errors([rank["state"] for rank in ranks], reference.state)
    missing = (reference.gradients.keys() - gradients.keys()) | (reference.state.keys() - state.keys())
    persistent = {spec.name for spec in manifest.parameters if spec.persistent}
    if missing & persistent:
        raise VerifyError(f"no rank holds {sorted(missing & persistent)}; emit the program again")
    losses = [rank["losses"] for rank in ranks]
    loss_difference = max(
        _relative(abs(found - expected), abs(expected))
        for rank in losses
        for found, expected in zip(rank, reference.losses, strict=True)
    )
    worst_gradient, worst_state = max(gradients.values(), default=0.0), max(state.values(), default=0.0)
    return Verification(
        equal=max(loss_difference, worst_gradient, worst_state) <= tolerance,
        tolerance=tolerance,
        ranks=len(ranks),
        losses=tuple(losses[0]),
        reference_losses=tuple(reference.losses),
        loss_difference=loss_difference,
        gradient_difference=worst_gradient,
        parameter_difference=worst_state,
        groups=tuple(_groups(gradients, state)),
        traffic=tuple(_traffic(plan, ranks)),
        notes=(*notes, *manifest.notes),
    )


def _errors(found: Sequence[Mapping[str, float]], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The error of each tensor, the largest over the ranks that hold it; see the module's docstring for the measure."""
    sizes = {
        name: float(in_float64(tensor).abs().max()) if tensor.numel() else 0.0 for name, tensor in expected.items()
    }
    floor = _FLOOR * max(sizes.values(), default=0.0)
    errors: dict[str, float] = {}
    for rank in found:
        for name, difference in rank.items():
            error = _relative(difference, max(sizes.get(name, 0.0), floor))
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _relative(difference: float, size: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    if difference == 0.0:
        return 0.0
    return difference / size if size else math.inf


def _groups(gradients: Mapping[str, float], state: Mapping[str, float]) -> list[GroupDifference]:
    names: dict[str, list[str]] = {}
    for name in dict.fromkeys((*state, *gradients)):
        names.setdefault(pattern_of(name), []).append(name)
    return [
        GroupDifference(
            group,
            len(members),
            max((gradients[name] for name in members if name in gradients), default=None),
            max((state[name] for name in members if name in state), default=0.0),
        )
        for group, members in names.items()
    ]


def _traffic(plan: Plan | None, ranks: Sequence[Mapping[str, Any]]) -> list[StageTraffic]:
    """What a rank of each stage exchanged inside the stage, against what the plan charges for all its microbatches."""
    found: list[StageTraffic] = []
    for stages in dict.fromkeys(tuple(rank["stages"]) for rank in ranks):
        counts = [_inside(rank["traffic"]) for rank in ranks if tuple(rank["stages"]) == stages]
        planned: dict[str, tuple[int, int]] | None = None
        if plan is not None:
            planned = {}
            for stage in (plan.stages[index] for index in stages):
                for part, times in ((stage.collectives, plan.microbatches), (stage.step_collectives, 1)):
                    for kind, count in part.items():
                        if count["calls"]:
                            calls, size = planned.get(kind, (0, 0))
                            planned[kind] = (calls + count["calls"] * times, size + count["bytes"] * times)
        # All ranks of a stage take part in the same collectives; one that does not is shown.
        odd = next((count for count in counts if count != planned), counts[0])
        found.append(StageTraffic(stages, odd, planned))
    return found


def _inside(traffic: Sequence[Sequence[Any]]) -> dict[str, tuple[int, int]]:
    """Calls and bytes by kind: of the microbatches on the stage's own axes, and for the parameters."""
    totals: dict[str, tuple[int, int]] = {}
    for kind, axis, phase, calls, size in traffic:
        if phase == "update" or (phase in ("forward", "backward") and axis != "stage"):
            before = totals.get(kind, (0, 0))
            totals[kind] = (before[0] + calls, before[1] + size)
    return totals


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

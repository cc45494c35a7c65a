"""A plan for inputs of other sizes than it was made for: the same stages, strategies and shares of parameters.

Blocks are cut where few bytes cross, so the same model with longer sequences may have other blocks. A plan is carried
over by its ops: those of the two programs have to be the same in number and order, each goes to the stage where its
like is, with the same strategy. Where a strategy shards what does not divide at these sizes, such as a sequence of odd
length, the op runs on every rank instead; transitions are put in as ever, so that the result is right, if slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopart.analysis import Analysis, look_up
from autopart.passes.blocks import Block
from autopart.passes.conversion import Axes
from autopart.passes.outline import outline, own_ops
from autopart.passes.program import Program, TensorInfo
from autopart.plan import Plan
from autopart.realize import axes_of, read_strategy
from autopart.runtime.errors import PlanError


@dataclass(frozen=True, slots=True)
class Outline:
    """What a planned program shares with those for other sizes. ops, keys, blocks: of each op, in the graph's order."""

    ops: tuple[str, ...]
    keys: tuple[str, ...]
    blocks: tuple[int, ...]
    tensors: Mapping[str, TensorInfo]
    outputs: tuple[str, ...]
    loss: str | None

    @staticmethod
    def of(analysis: Analysis) -> Outline:
        program, ops = analysis.program, own_ops(analysis.graph, analysis.free)
        return Outline(
            outline(analysis.graph, analysis.free),
            tuple(analysis.keys[node] for node in ops),
            tuple(analysis.block_of[node] for node in ops),
            _lasting(program),
            tuple(info.name for info in program.outputs),
            program.loss,
        )


def carry(plan: Plan, planned: Outline, analysis: Analysis) -> tuple[Plan, Analysis, tuple[str, ...]]:
    """The plan, and the analysis of the program for other sizes, as they go together; and the ops that are not sharded.

    Raises PlanError where the two programs do not consist of the same ops and tensors.
    """
    program = analysis.program
    outputs = tuple(info.name for info in program.outputs)
    if (planned.tensors, planned.outputs, planned.loss) != (_lasting(program), outputs, program.loss):
        raise PlanError(
            "the model has other parameters, buffers or outputs there; plan it for these sizes, or pad to the planned "
            "ones"
        )
    nodes, ops = own_ops(analysis.graph, analysis.free), outline(analysis.graph, analysis.free)
    if ops != planned.ops:
        pairs = zip((*planned.ops, "nothing"), (*ops, "nothing"), strict=False)
        ours, theirs = next(pair for pair in pairs if pair[0] != pair[1])
        raise PlanError(
            f"the model computes by other ops there ({theirs} where {ours} was planned), of which the plan does not "
            "say where they run; plan it for these sizes, or pad to the planned ones"
        )
    inside: list[list[int]] = [[] for _ in range(1 + max(planned.blocks, default=-1))]
    for position, block in enumerate(planned.blocks):
        inside[block].append(position)
    carried = replace(
        analysis,
        blocks=[Block(index, tuple(nodes[at] for at in found), "") for index, found in enumerate(inside)],
        block_of=dict(zip(nodes, planned.blocks, strict=True)),
        keys={**analysis.keys, **dict(zip(nodes, planned.keys, strict=True))},
    )
    whole: dict[str, None] = {}
    stages, strategies = plan.stages, plan.strategies
    if plan.is_uniform:
        strategies = _offered(carried, strategies, axes_of(stages[0]), whole)
    else:
        own = [_offered(carried, stage.strategies or strategies, axes_of(stage), whole) for stage in stages]
        stages = tuple(replace(stage, strategies=found) for stage, found in zip(stages, own, strict=True))
    fitted = replace(
        plan,
        fingerprint=program.fingerprint,
        stages=stages,
        strategies=strategies,
        tokens=program.tokens(plan.batch),
        flops=analysis.flops(plan.batch) if plan.flops else 0.0,
    )
    return fitted, carried, tuple(whole)


def _lasting(program: Program) -> dict[str, TensorInfo]:
    """Parameters, and the buffers that a step changes or a state dict has."""
    updated = program.updated_buffers
    return {i.name: i for i in program.tensors.values() if not i.buffer or i.persistent or i.name in updated}


def _offered(analysis: Analysis, strategies: Mapping[str, str], axes: Axes, whole: dict[str, None]) -> dict[str, str]:
    """The strategies, replicated where the ops do not offer them; these ops are added to ``whole``."""
    found = dict(strategies)
    for node in analysis.block_of if axes else ():
        key = analysis.keys[node]
        try:
            read_strategy(analysis, node, look_up(strategies, key), axes)
        except PlanError:
            found[key] = ",".join("R" for _ in axes)
            whole[key] = None
    return found

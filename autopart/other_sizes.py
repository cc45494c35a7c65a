"""A plan for inputs of other sizes than it was made for: the same stages, strategies and shares of parameters.

Blocks are cut where few bytes cross, so the same model with longer sequences may have other blocks. A plan is carried
over by its ops: those of the two programs have to be the same in number and order, each goes to the stage where its
like is, with the same strategy. Slices come and go: what keeps everything, as a table of positions cut to its full
length, leaves no op. Those without a like go where they are read. Where a strategy shards what does not divide at these
sizes, such as a sequence of odd length, the op runs on every rank instead; transitions are put in as ever, so that the
result is right, if slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopart.analysis import Analysis, look_up, pattern_of
from autopart.passes.blocks import Block
from autopart.passes.conversion import Axes
from autopart.passes.outline import comes_and_goes, outline, own_ops
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
    nodes = own_ops(analysis.graph, analysis.free)
    likes = _likes(planned.ops, outline(analysis.graph, analysis.free))
    block_of = {node: planned.blocks[like] for node, like in zip(nodes, likes, strict=True) if like is not None}
    for node in reversed(nodes):
        if node not in block_of:
            block_of[node] = _beside(node, block_of)
    inside: list[list[fx.Node]] = [[] for _ in range(1 + max(planned.blocks, default=-1))]
    for node in nodes:
        inside[block_of[node]].append(node)
    keys = dict(analysis.keys)
    for node, like in zip(nodes, likes, strict=True):
        keys[node] = f"{keys[node]}.kept" if like is None else planned.keys[like]  # the plan says nothing of the former
    carried = replace(
        analysis,
        blocks=[Block(index, tuple(found), "") for index, found in enumerate(inside)],
        block_of={node: block_of[node] for node in nodes},
        keys=keys,
    )
    whole: dict[str, None] = {}
    stages, strategies = plan.stages, plan.strategies
    if plan.is_uniform:
        strategies = _offered(carried, strategies, axes_of(stages[0]), whole)
    else:
        own = [_offered(carried, stage.strategies or strategies, axes_of(stage), whole) for stage in stages]
        stages = tuple(replace(stage, strategies=found) for stage, found in zip(stages, own, strict=True))
        strategies = {}
    fitted = replace(
        plan,
        fingerprint=program.fingerprint,
        stages=stages,
        strategies=strategies,
        tokens=program.tokens(plan.batch),
        flops=analysis.flops(plan.batch) if plan.flops else 0.0,
    )
    return fitted, carried, tuple(whole)


def _likes(planned: Sequence[str], ops: Sequence[str]) -> list[int | None]:
    """For each op the number of its like among the planned ones; None for what has none, as it may come and go.

    Raises PlanError where any other op differs.
    """
    found: list[int | None] = []
    here = there = 0
    while True:
        ours, theirs = _passing(planned, here), _passing(ops, there)
        alike = planned[here:ours] == ops[there:theirs]
        found += range(here, ours) if alike else [None] * (theirs - there)
        if ours == len(planned) and theirs == len(ops):
            return found
        own, other = (some[at] if at < len(some) else "nothing" for some, at in ((planned, ours), (ops, theirs)))
        if own != other:
            raise PlanError(
                f"the model computes by other ops there ({other} where {own} was planned), of which the plan does not "
                "say where they run; plan it for these sizes, or pad to the planned ones"
            )
        found.append(ours)
        here, there = ours + 1, theirs + 1


def _passing(ops: Sequence[str], start: int) -> int:
    """Where the run of ops that may come and go ends."""
    return next((at for at in range(start, len(ops)) if not comes_and_goes(ops[at])), len(ops))


def _beside(node: fx.Node, block_of: Mapping[fx.Node, int]) -> int:
    """The first block that reads an op, else the last that it reads."""
    users = [block_of[user] for user in node.users if user in block_of]
    return min(users) if users else max((block_of.get(item, 0) for item in node.all_input_nodes), default=0)


def _lasting(program: Program) -> dict[str, TensorInfo]:
    """Parameters, and the buffers that a step changes or a state dict has."""
    updated = program.updated_buffers
    return {i.name: i for i in program.tensors.values() if not i.buffer or i.persistent or i.name in updated}


def _offered(analysis: Analysis, strategies: Mapping[str, str], axes: Axes, whole: dict[str, None]) -> dict[str, str]:
    """The strategies, replicated where the ops do not offer them; these ops are added to ``whole``."""
    known = set(analysis.keys.values())
    known |= {pattern_of(name) for name in known}
    found = {name: text for name, text in strategies.items() if name in known}
    for node in analysis.block_of if axes else ():
        key = analysis.keys[node]
        try:
            read_strategy(analysis, node, look_up(strategies, key), axes)
        except PlanError:
            found[key] = ",".join("R" for _ in axes)
            whole[key] = None
    return found

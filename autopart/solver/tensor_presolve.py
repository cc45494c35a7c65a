"""Which choices of a tensor problem can be part of a best assignment at all.

A choice goes when another of its op has the same placements and costs no more in seconds and bytes (dominated), or when
one of its inputs or outputs can be converted from or to nothing that the other end still offers (unreachable). Removing
one can make others unreachable, so this repeats until nothing changes.
"""

from __future__ import annotations

from autopart.solver.tensor_problem import IMPOSSIBLE, Choice, Edge, Op, TensorProblem

Live = list[list[int]]
"""Per op the indices of the choices that remain, cheapest first."""


def live_choices(problem: TensorProblem) -> Live | None:
    """The choices that remain, or None when an op has none left: no assignment exists."""
    live = [_undominated(op) for op in problem.ops]
    changed = True
    while changed:
        changed = False
        for edge in problem.edges:
            for op, slot in edge.uses:
                changed |= _drop_unreachable(problem, live, edge, op, slot)
        if not all(live):
            return None
    return live


def _undominated(op: Op) -> list[int]:
    kept: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Choice]] = {}
    result = []
    for index in sorted(range(len(op.choices)), key=lambda c: (op.choices[c].cost, op.choices[c].memory)):
        choice = op.choices[index]
        rivals = kept.setdefault((choice.outputs, choice.inputs), [])
        if all(rival.memory > choice.memory for rival in rivals):
            rivals.append(choice)
            result.append(index)
    return result


def _drop_unreachable(problem: TensorProblem, live: Live, edge: Edge, op: int, slot: int) -> bool:
    """Keeps at both ends of one use the choices that some choice of the other end can be converted with."""
    sources, users = problem.ops[edge.source].choices, problem.ops[op].choices
    produced = {sources[c].outputs[edge.output] for c in live[edge.source]}
    wanted = {users[c].inputs[slot] for c in live[op]}
    pairs = [(p, t) for p in produced for t in wanted if edge.seconds(p, t) < IMPOSSIBLE]
    if len({t for _, t in pairs}) == len(wanted) and len({p for p, _ in pairs}) == len(produced):
        return False
    ends, starts = {t for _, t in pairs}, {p for p, _ in pairs}
    live[op] = [c for c in live[op] if users[c].inputs[slot] in ends]
    live[edge.source] = [c for c in live[edge.source] if sources[c].outputs[edge.output] in starts]
    return True

"""Published schemes of tensor sharding as choices of strategies: what each product does, everything else follows.

2d      SUMMA on x, y (Optimus, arXiv 2104.05343)
2.5d    the same with rows sharded on z as well, where the weights are gathered (arXiv 2110.14883)
3d      rows on x, and what is summed over and the columns on y and z, which change places from product to product;
        operands are gathered, results reduced and scattered (arXiv 2105.14450)

Weights are stored sharded on every axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.rules import RULES, Strategy, compatible, joint_strategies, strategies
from autopart.runtime.placement import BROADCAST, REPLICATE, Kind, Placement, Placements, nested, shard
from programs import Choose

_SECOND = ("c_proj", "o_proj", "down_proj", "second")
"""Products whose operand another product made; in the 3-D scheme the two axes change places there."""
Chosen = tuple[Strategy, ...]


def is_product(node: fx.Node) -> bool:
    """Whether an op multiplies by a weight."""
    operands = graphs.input_nodes(node)
    rule = RULES.rule(node)
    return rule is not None and rule.panels is not None and "weight" in operands[rule.panels.right].meta.get("name", "")


def _names(scheme: str, node: fx.Node, offered: Iterable[str]) -> tuple[str, ...]:
    weight = next(item.meta["name"] for item in graphs.input_nodes(node) if "weight" in item.meta.get("name", ""))
    rows, finer = ("m/b", "m/2b") if "m/b" in offered else ("b1", "b1/2") if "b1" in offered else ("m", "m/2")
    columns = "n/3" if "c_attn" in weight else "n"
    if scheme == "3d":
        return (rows, columns, "k") if any(part in weight for part in _SECOND) else (rows, "k", columns)
    return (f"summa_{rows}", f"summa_{columns}", *([finer] if scheme == "2.5d" else []))


def stored(shape: Sequence[int], used: Placements, sizes: Sequence[int]) -> Placements:
    """Where it is used whole a matrix is stored sharded: inside the pieces that the other axes make of a dim. A vector
    is stored as it is used, but for a bias that is used as a partial sum.
    """
    found = [REPLICATE if placement.kind is Kind.PARTIAL else placement for placement in used]
    if len(shape) < 2:
        return tuple(found)
    for axis, placement in enumerate(used):
        if placement.is_shard:
            continue
        for dim, size in enumerate(shape):
            cuts = [p.outer * sizes[i] for i, p in enumerate(found) if p.is_shard and p.dim == dim]
            wanted = shard(dim, max(cuts, default=1))
            trial = (*found[:axis], wanted, *found[axis + 1 :])
            if size % (wanted.outer * sizes[axis]) == 0 and nested(trial, sizes):
                found[axis] = wanted
                break
        else:
            raise AssertionError(f"{list(shape)} cannot be stored sharded on axis {axis} beside {used}")
    return tuple(found)


def _fit(option: Strategy, sources: Sequence[Placement | None]) -> float:
    """How much of what there is can be taken as it is; sums are best made where they can be scattered."""
    score = 0.0
    for wanted, source in zip(option.inputs, sources, strict=True):
        score += 1.0 * (wanted == source)
        score += 0.5 * (source is not None and source.kind is Kind.PARTIAL and wanted.is_shard)
        score += 0.2 * (source in (None, REPLICATE) and wanted == BROADCAST)
    return score + 0.1 * option.outputs[0].is_shard - 0.05 * len(str(option.name))


def scheme(kind: str) -> Choose:
    """The strategies and storage of a scheme by its name: 2d, 2.5d, 3d."""

    def choose(graph: fx.Graph, *sizes: int) -> tuple[dict[fx.Node, Chosen], dict[str, Placements]]:
        alone = [strategies(graph, parts) for parts in sizes]
        beside = [
            strategies(graph, parts, others=[*sizes[:index], *sizes[index + 1 :]]) for index, parts in enumerate(sizes)
        ]
        found: dict[fx.Node, Chosen] = {}
        storage: dict[str, Placements] = {}
        given: dict[Value, Placements] = {}
        for node in beside[0]:
            if not graphs.is_op(node):
                continue
            inputs = graphs.inputs(node)
            if is_product(node):
                names = _names(kind, node, {item.name for item in beside[0][node]})
                if kind == "3d":
                    picked: Chosen = tuple(
                        next(item for item in beside[axis][node] if item.name == name)
                        for axis, name in enumerate(names)
                    )
                else:
                    tuples = joint_strategies(node, [s[node] for s in alone], [s[node] for s in beside], sizes)
                    (picked,) = [item for item in tuples if tuple(strategy.name for strategy in item) == names]
            else:
                ranked = []
                for axis in range(len(sizes)):
                    sources = [given[value][axis] if value in given else None for value in inputs]
                    options = beside[axis][node]
                    ranked.append(sorted(options, key=lambda item: -_fit(item, sources))[:6])
                tried = sorted(itertools.product(*(range(len(options)) for options in ranked)), key=sum)
                picked = next(
                    chosen
                    for positions in tried
                    if compatible(node, chosen := tuple(r[i] for r, i in zip(ranked, positions, strict=True)), sizes)
                )
            found[node] = picked
            for index, value in enumerate(graphs.outputs(node)):
                given[value] = tuple(item.outputs[index] for item in picked)
            for index, value in enumerate(inputs):
                source = value.node
                if source.op == "placeholder" and source.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                    used = tuple(item.inputs[index] for item in picked)
                    name = source.meta["name"]
                    whole = source.meta["role"] is Role.BUFFER
                    storage.setdefault(name, used if whole else stored(tuple(value.fake.shape), used, sizes))
        return found, storage

    return choose


def share(shape: Sequence[int], placements: Placements, sizes: Sequence[int]) -> int:
    """Elements of a rank's part."""
    parts = math.prod(size for placement, size in zip(placements, sizes, strict=True) if placement.is_shard)
    return math.prod(shape) // parts

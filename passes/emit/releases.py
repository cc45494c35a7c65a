"""Names that a function lets go of before it returns: ``del all_reduce``.

A name keeps its tensor until the function returns. Of what autograd keeps for the backward that costs nothing; all
else is let go behind the last statement that reads it, where the function goes on making tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.emit.functions import Function
from autopart.passes.graph import Value
from autopart.passes.kept import owner_of


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long code holds values: one without a name (``inlined``) until its only reader is done, others until their
    function returns, but for memory that is ``freed`` before, by the op behind which it is.
    """

    inlined: Collection[fx.Node] = ()
    freed: Mapping[fx.Node, Sequence[Value]] = field(default_factory=dict)


def let_go(function: Function, lasting: Collection[Value]) -> dict[fx.Node, list[Value]]:
    """Writes the ``del`` statements into a function that is complete otherwise.

    lasting: owners of memory that stay anyway. Returns the memory that is freed, by the op behind which it is: that
    whose last name goes.
    """
    statements = ast.parse("\n".join(function.lines)).body
    makes = _makers(function, statements)
    last = _last_reads(function, statements)
    goes: dict[Value, int | None] = {}  # by owner, the statement behind which its last name goes; None: stays
    behind: dict[int, list[str]] = {}
    for name, node in function.named.items():
        owners = set(map(owner_of, _values(node)))
        end = next((index for index in range(last[name], len(statements)) if index in makes), None)
        stays = name in function.handed or any(owner in lasting or owner.node.op != "call_function" for owner in owners)
        if stays or end is None or end == max(makes):
            goes.update(dict.fromkeys(owners))
            continue
        for owner in owners:
            known = goes.get(owner, end)
            goes[owner] = None if known is None else max(known, end)
        if any(value.fake.dim() for value in _values(node)):
            behind.setdefault(end, []).append(name)
    for index in sorted(behind, reverse=True):
        end_line = statements[index].end_lineno
        assert end_line is not None
        function.lines.insert(end_line, f"del {', '.join(behind[index])}")
    freed: dict[fx.Node, list[Value]] = {}
    for owner, end in goes.items():
        if end is not None and owner.fake.dim():
            freed.setdefault(makes[end], []).append(owner)
    return freed


def _values(node: fx.Node) -> list[Value]:
    return [graphs.value_of(node)] if graphs.is_tensor(node) else graphs.outputs(node)


def _makers(function: Function, statements: list[ast.stmt]) -> dict[int, fx.Node]:
    """By number of a statement the op that it ends with; only of those that make something."""
    found: dict[int, fx.Node] = {}
    for index, statement in enumerate(statements):
        for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno):
            if line in function.made:
                found[index] = function.made[line]
    return found


def _last_reads(function: Function, statements: list[ast.stmt]) -> Mapping[str, int]:
    """The last statement with each name; of what a transition is given that is begun, the one with its result."""
    names = [set(_names(statement)) for statement in statements]
    found = {name: index for index, own in enumerate(names) for name in own}
    for own in names:
        for begun in own & function.started:
            for name in own - {begun}:
                found[name] = max(found[name], found[begun] + 1)
    return found


def _names(statement: ast.stmt) -> Iterator[str]:
    return (item.id for item in ast.walk(statement) if isinstance(item, ast.Name))

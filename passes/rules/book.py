"""A book of rules: from an op's name to its annotation, and how its size arguments shrink on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from autopart.passes import graph
from autopart.passes.rules.notation import Annotation, Extents, Rule, RuleError, bind, product_at
from autopart.passes.sizes import Extent, extent

Entry: TypeAlias = str | Annotation | Callable[[fx.Node], str | Annotation | None]
"""A rule as written down: the text alone, with its properties, or built from the node (None: replicate only)."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of an op: its rule, the factors' whole and local sizes, and the local shapes of the outputs."""

    rule: Rule
    sizes: Mapping[str, Extent | None]
    outputs: tuple[Extents, ...]

    def changed(self, factors: tuple[str, ...]) -> bool:
        return any(self.sizes[name] != self.rule.sizes[name] for name in factors)


Localizer = Callable[[fx.Node, Local], Arguments | None]
"""Rewrites an op's size arguments for one rank; None if they cannot be written down."""


def name_of(node: fx.Node) -> str:
    """The key of a node's op in a book: ``aten.linear.default``; for a Python function its qualified name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, str):
        return target
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    return f"{module}.{name}" if name else str(target)


def shape_of(tensor: torch.Tensor) -> Extents:
    """The extents of all dims of a fake tensor, None where a size is no multiple of the batch size."""
    return tuple(extent(size) for size in tensor.shape)


@dataclass(frozen=True, slots=True)
class RuleBook:
    """Rules by op name. An op that is not in the book is replicated.

    entries: see :data:`Entry`. local: rewrites of size arguments, for the ops that have any.
    """

    entries: Mapping[str, Entry] = field(hash=False)
    local: Mapping[str, Localizer] = field(default_factory=dict, hash=False)

    def extended(self, entries: Mapping[str, Entry], local: Mapping[str, Localizer] | None = None) -> RuleBook:
        """A book with further rules, which win over the present ones."""
        return RuleBook({**self.entries, **entries}, {**self.local, **(local or {})})

    def rule(self, node: fx.Node) -> Rule | None:
        """The rule of an op for its shapes; None if the book has none. Raises RuleError if it does not fit."""
        entry = self.entries.get(name_of(node))
        found = entry(node) if callable(entry) else entry
        if found is None:
            return None
        annotation = Annotation(found) if isinstance(found, str) else found
        try:
            return bind(
                annotation,
                [shape_of(value.fake) for value in graph.inputs(node)],
                [shape_of(value.fake) for value in graph.outputs(node)],
            )
        except RuleError as error:
            where = graph.source_line(node) or graph.module_path(node) or node.name
            raise RuleError(f"{name_of(node)} at {where}: {error}") from error


def flops(node: fx.Node, batch: int, rules: RuleBook) -> int:
    """Floating-point operations of the forward of a contraction: 2 per multiply-add; 0 for every other op."""
    rule = rules.rule(node)
    if rule is None:
        return 0
    return sum(2 * product_at(rule, names, batch) for names in rule.products)

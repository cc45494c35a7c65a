"""How torch computes an einsum of two tensors, as far as memory shows it (``at::einsum``, ``sumproduct_pair``).

With labels that are summed it is one batched product, of the operands permuted and seen as three dims: labels of both
that the result has, those of one alone, and what is summed. An operand that cannot be seen so is copied, and the copy
is kept. Without, it is a multiplication of the operands as they are, broadcast to the result.
"""

from __future__ import annotations

import math

from torch import fx

from autopart.passes.graph import Value, inputs
from autopart.passes.storage import can_view, laid_out, op_name


def multiplies(node: fx.Node) -> bool:
    """Whether an op is an einsum that sums nothing."""
    parsed = _labels(node)
    return parsed is not None and not _summed(*parsed)


def copied_operands(node: fx.Node) -> list[Value]:
    """The operands that an einsum copies."""
    parsed = _labels(node)
    if parsed is None or not (summed := _summed(*parsed)):
        return []
    (left, right), result = parsed
    shared = [label for label in result if label in left and label in right]
    found = []
    for value, labels, is_left in zip(inputs(node), (left, right), (True, False), strict=True):
        alone = [label for label in result if label in labels and label not in shared]
        parts = [shared, alone, summed] if is_left else [shared, summed, alone]
        there = laid_out(value)
        if there is None:
            continue
        seen = there.permute([labels.index(label) for part in parts for label in part])
        if not can_view(seen, [math.prod(there.shape[labels.index(label)] for label in part) for part in parts]):
            found.append(value)
    return found


def _labels(node: fx.Node) -> tuple[tuple[str, str], str] | None:
    """The operands' labels and the result's.

    None for what is no einsum of two tensors without repeated labels, or sums a label of one alone beforehand.
    """
    if op_name(node) != "einsum" or len(inputs(node)) != 2:
        return None
    terms, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    plain = arrow and all(len(set(text)) == len(text) and "." not in text for text in (left, right, result))
    plain = plain and not (set(left) ^ set(right)) - set(result)
    return ((left, right), result) if plain else None


def _summed(operands: tuple[str, str], result: str) -> list[str]:
    return sorted({label for text in operands for label in text if label not in result})

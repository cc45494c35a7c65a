"""Rules of distances and similarities of vectors: what they are taken over is whole."""

from __future__ import annotations

from torch import fx

from autopart.passes.rules.arguments import argument, names, operands, positive, rank_of
from autopart.passes.rules.book import Entry


def _cosine_similarity(node: fx.Node) -> str:
    rank = max(rank_of(node), rank_of(node, 1))
    dim = positive(argument(node, 2, "dim", 1), rank)
    terms = [f"^{name}" if index == dim else name for index, name in enumerate(names(rank))]
    given = [" ".join(terms[rank - rank_of(node, operand) :]) for operand in range(operands(node))]
    return f"{', '.join(given)} -> {' '.join(terms[:dim] + terms[dim + 1 :])}"


def _pairwise_distance(node: fx.Node) -> str:
    return "*b ^d, *b ^d -> *b" + (" 1" if argument(node, 4, "keepdim", False) else "")


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        "aten.cosine_similarity.default": _cosine_similarity,
        "aten.pairwise_distance.default": _pairwise_distance,
        # by a matrix product where a side has over 25 vectors, which a share may not have: rounded otherwise then
        "aten.cdist.default": "*b p ^m, *b r ^m -> *b p r",
    }

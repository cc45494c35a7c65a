"""Rules of recurrent modules and cells (LSTM, GRU, RNN), each of which is one op: samples are independent, the rest is
whole.
"""

from __future__ import annotations

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, rank_of
from autopart.passes.rules.book import Entry
from autopart.passes.rules.notation import Annotation


def _layers(node: fx.Node) -> Annotation | None:
    """Sequences, the first states, and the weights; outputs of all times and the last states."""
    if rank_of(node) != 3:
        return None
    sequence = "b ^t _" if argument(node, 8, "batch_first", False) else "^t b _"
    states = ["_ b _"] * _states(node)
    texts, products = _weights(node, "b t")
    random = bool(argument(node, 5, "dropout") and argument(node, 6, "train"))
    return Annotation(
        f"{', '.join([sequence, *states, *texts])} -> {', '.join([sequence, *states])}",
        products=products,
        random=random,
    )


def _cell(node: fx.Node) -> Annotation | None:
    """One time of one layer."""
    if rank_of(node) != 2:
        return None
    states = ["b _"] * _states(node)
    texts, products = _weights(node, "b")
    return Annotation(f"{', '.join(['b _', *states, *texts])} -> {', '.join(states)}", products=products)


def _states(node: fx.Node) -> int:
    """Tensors in the argument ``hx``: two of an LSTM, which come as a list."""
    states = argument(node, 1, "hx")
    return len(states) if isinstance(states, list | tuple) else 1


def _weights(node: fx.Node, rows: str) -> tuple[list[str], tuple[str, ...]]:
    """The texts of weights and biases, and the products with the weights."""
    ranks = [value.fake.dim() for value in graph.inputs(node)[1 + _states(node) :]]
    matrices = [index for index, rank in enumerate(ranks) if rank == 2]
    texts = [f"^n{index} ^k{index}" if index in matrices else "_" for index in range(len(ranks))]
    return texts, tuple(f"{rows} n{index} k{index}" for index in matrices)


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    cells = [name.replace(".input", "_cell.default") for name in graph.RECURRENT]
    return {**dict.fromkeys(graph.RECURRENT, _layers), **dict.fromkeys(cells, _cell)}

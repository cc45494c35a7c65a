"""Rules of the ops that pick and place elements by computed positions: the dim that positions count in is frozen."""

from __future__ import annotations

import torch
from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, names, operands, positive, rank_of
from autopart.passes.rules.book import Entry, shape_of
from autopart.passes.rules.notation import Annotation, LocalForm
from autopart.passes.sizes import ONE


def _embedding(node: fx.Node) -> Annotation:
    """Rows are picked by token: columns and tokens are free, rows by a local form. Frequencies tie the tokens."""
    if argument(node, 3, "scale_grad_by_freq", False):
        return Annotation("^v n, ^*t -> ^*t n", linear=((0,),))
    if argument(node, 4, "sparse", False):
        return Annotation("^v n, *t -> *t n", linear=((0,),))
    return Annotation("v n, *t -> *t n", linear=((0,),), forms={"v": LocalForm("vocab_embedding", several=True)})


def _indexed(node: fx.Node) -> tuple[list[str], list[str], int] | None:
    """The terms of ``self`` and of the result of ``self[indices]``, and the number of index tensors.

    Index tensors broadcast to a run ``*i``, which stands where the indexed dims were if they were neighbours, else in
    front. Boolean masks pick a number of elements that depends on the data: None.
    """
    indices = argument(node, 1, "indices")
    used = [dim for dim, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if not used or any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    before = ["^x" + name if dim in used else name for dim, name in enumerate(names(rank_of(node)))]
    free = [dim for dim in range(len(before)) if dim not in used]
    together = used == list(range(used[0], used[-1] + 1))
    position = used[0] if together else 0
    after = [before[dim] for dim in free]
    return before, [*after[:position], "*i", *after[position:]], len(used)


def _index(node: fx.Node) -> Annotation | None:
    found = _indexed(node)
    if found is None:
        return None
    before, after, count = found
    return Annotation(f"{', '.join([' '.join(before), *['*i'] * count])} -> {' '.join(after)}", linear=((0,),))


def _index_put(node: fx.Node) -> Annotation | None:
    """Accumulated values are summed over the positions: a shard of them gives a partial sum. Values that lack leading
    dims are for all positions.
    """
    found = _indexed(node)
    if found is None:
        return None
    before, after, count = found
    accumulate = bool(argument(node, 3, "accumulate", False))
    values = rank_of(node, count + 1)
    shapes = [shape_of(value.fake) for value in graph.inputs(node)[1 : count + 1]]
    width = max(len(shape) for shape in shapes)
    if values != width + len(after) - 1:
        behind = after[after.index("*i") + 1 :]
        if values > len(behind):
            return None
        after = behind[len(behind) - values :]
    run = "*i" if accumulate and "*i" in after else "^*i"
    picked = " ".join(after).replace("*i", run)
    text = ", ".join([" ".join(before), *[run] * count, picked])
    # A single value for all positions, or one that replaces, keeps the positions together.
    last = count + 1
    return Annotation(f"{text} -> {' '.join(before)}", linear=((0, last),), affine=(0,) if accumulate else ())


def _index_select(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    before = names(rank)
    before[dim] = "_"
    after = [*before[:dim], "i", *before[dim + 1 :]]
    index = "i" if rank_of(node, 1) else ""
    if not index:
        return Annotation(f"{' '.join(before)}, -> {' '.join(after)}".replace(" i", " 1"), linear=((0,),))
    return Annotation(f"{' '.join(before)}, {index} -> {' '.join(after)}", linear=((0,),))


def _aligned(node: fx.Node, index: int, dim: int) -> list[tuple[str, str]]:
    """The terms of ``self`` and of an index tensor over all dims but ``dim``: shared where the sizes agree."""
    source = shape_of(graph.inputs(node)[0].fake)
    other = shape_of(graph.inputs(node)[index].fake)
    return [
        (name, name) if source[position] == other[position] and position != dim else (f"^x{name}", f"^y{name}")
        for position, name in enumerate(names(len(source)))
    ]


def _gather(node: fx.Node) -> Annotation:
    """Each picked element names its position along ``dim``; the picks are independent of each other."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    terms = _aligned(node, 1, dim)
    source = " ".join(before for before, _ in terms)
    picked = " ".join("i" if position == dim else after for position, (_, after) in enumerate(terms))
    return Annotation(f"{source}, {picked} -> {picked}", linear=((0,),))


def _scatter(node: fx.Node) -> Annotation | None:
    """Places or adds along ``dim``; sums over a shard of the positions are partial sums where they are added."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    terms = _aligned(node, 1, dim)
    add = "scatter_add" in str(node.target)
    place = "i" if add else "^i"
    target = " ".join(before for before, _ in terms)
    picked = " ".join(place if position == dim else after for position, (_, after) in enumerate(terms))
    if operands(node) == 2:  # scatter.value
        linear = ((0,),) if argument(node, 3, "value") == 0 else ()
        return Annotation(f"{target}, {picked} -> {target}", linear=linear)
    if shape_of(graph.inputs(node)[2].fake) != shape_of(graph.inputs(node)[1].fake):
        return None
    return Annotation(f"{target}, {picked}, {picked} -> {target}", linear=((0, 2),), affine=(0,) if add else ())


def _scatter_reduce(node: fx.Node) -> Annotation | None:
    """Places and reduces along ``dim``. Sums to what was there are an accumulating scatter; others need all places."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    terms = _aligned(node, 1, dim)
    how = node.kwargs.get("reduce", argument(node, 4, "reduce"))
    add = how in ("sum", "add") and node.kwargs.get("include_self", True) and operands(node) == 3
    place = "i" if add else "^i"
    target = " ".join(before for before, _ in terms)
    picked = " ".join(place if position == dim else after for position, (_, after) in enumerate(terms))
    if operands(node) == 2:  # one value for all places
        return Annotation(f"{target}, {picked} -> {target}")
    if shape_of(graph.inputs(node)[2].fake) != shape_of(graph.inputs(node)[1].fake):
        return None
    text = f"{target}, {picked}, {picked} -> {target}"
    return Annotation(text, linear=((0, 2),), affine=(0,)) if add else Annotation(text)


def _index_reduce(node: fx.Node) -> str:
    """``index_reduce`` and ``index_copy``: whole rows of ``source`` along a frozen dim."""
    target = names(rank_of(node))
    dim = positive(argument(node, 1, "dim"), max(len(target), 1))
    source = [*target[:dim], "^i", *target[dim + 1 :]]
    target[dim] = f"^{target[dim]}"
    return f"{' '.join(target)}, {'^i' * rank_of(node, 1)}, {' '.join(source)} -> {' '.join(target)}"


def _index_copy(node: fx.Node) -> Annotation:
    return Annotation(_index_reduce(node), linear=((0, 2),))


def _index_fill(node: fx.Node) -> Annotation:
    """One value in the given places of a dim."""
    terms = names(rank_of(node))
    dim = positive(argument(node, 1, "dim"), len(terms))
    terms[dim] = f"^{terms[dim]}"
    line, index, value = " ".join(terms), "_" * rank_of(node, 1), argument(node, 3, "value")
    if operands(node) == 3:
        return Annotation(f"{line}, {index}, -> {line}", linear=((0, 2),))
    return Annotation(f"{line}, {index} -> {line}", linear=((0,),) if value == 0 else ())


def _taken_along(node: fx.Node) -> Annotation | None:
    """As gather, where the other dims broadcast; without a dim all elements are one row."""
    rank, dim = rank_of(node), argument(node, 2, "dim")
    if dim is None:
        return Annotation("^*x, *i -> *i", linear=((0,),)) if rank_of(node, 1) == 1 else None
    dim = positive(dim, rank)
    shapes = [shape_of(value.fake) for value in graph.inputs(node)]
    source, picked, found = names(rank), names(rank), names(rank)
    source[dim], picked[dim], found[dim] = "_", "i", "i"
    for position, sizes in enumerate(zip(*shapes, strict=True)):
        if position != dim and sizes[0] != sizes[1]:
            source[position] = "1" if sizes[0] == ONE else found[position]
            picked[position] = "1" if sizes[1] == ONE else found[position]
    return Annotation(f"{' '.join(source)}, {' '.join(picked)} -> {' '.join(found)}", linear=((0,),))


def _index_add(node: fx.Node) -> Annotation:
    """``index_add(self, dim, index, source)``: as an accumulating scatter of whole rows."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    target = names(rank)
    source = [*target[:dim], "i", *target[dim + 1 :]]
    target[dim] = "^" + target[dim]
    text = f"{' '.join(target)}, i, {' '.join(source)} -> {' '.join(target)}"
    return Annotation(text, linear=((0, 2),), affine=(0,))


def _chosen(position: int) -> Entry:
    """topk, sort and argsort: the compared dim (the argument at ``position``) is frozen."""

    def build(node: fx.Node) -> str:
        rank = rank_of(node)
        dim = positive(argument(node, position, "dim", -1), rank)
        terms = " ".join("_" if index == dim else name for index, name in enumerate(names(rank)))
        return f"{terms} -> " + ", ".join([terms] * len(graph.outputs(node)))

    return build


def _one_hot(node: fx.Node) -> str:
    return "*d -> *d _"


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        "aten.embedding.default": _embedding,
        "aten.index.Tensor": _index,
        "aten.index_put.default": _index_put,
        "aten.index_select.default": _index_select,
        "aten.index_add.default": _index_add,
        "aten.gather.default": _gather,
        "aten.scatter.src": _scatter,
        "aten.scatter.value": _scatter,
        "aten.scatter_add.default": _scatter,
        "aten.scatter_reduce.two": _scatter_reduce,
        "aten.scatter.reduce": _scatter_reduce,
        "aten.scatter.value_reduce": _scatter_reduce,
        "aten.index_reduce.default": _index_reduce,
        "aten.index_copy.default": _index_copy,
        "aten.index_fill.int_Scalar": _index_fill,
        "aten.index_fill.int_Tensor": _index_fill,
        "aten.take_along_dim.default": _taken_along,
        "aten.take.default": Annotation("^*x, *i -> *i", linear=((0,),)),
        "aten.masked_scatter.default": "^*d, ^*d, ^*s -> ^*d",
        "aten.topk.default": _chosen(2),
        "aten.sort.default": _chosen(1),
        "aten.sort.stable": _chosen(2),
        "aten.argsort.default": _chosen(1),
        "aten.one_hot.default": _one_hot,
        "aten.histc.default": "^*d -> _",
    }

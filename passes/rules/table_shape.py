"""Rules of the ops that rearrange, cut, join and repeat elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, dims_of, names, operands, positive, rank_of
from autopart.passes.rules.book import Entry, shape_of
from autopart.passes.rules.notation import Annotation
from autopart.passes.rules.reshape import reshape_annotation
from autopart.passes.sizes import ONE, Extent, extent


def _linear(before: Sequence[str], after: Sequence[str], sizes: dict[str, Extent] | None = None) -> Annotation:
    return Annotation(f"{' '.join(before)} -> {' '.join(after)}", linear=((0,),), sizes=sizes or {})


def _reshape(node: fx.Node) -> Annotation | None:
    return reshape_annotation(shape_of(graph.inputs(node)[0].fake), shape_of(graph.outputs(node)[0].fake))


def _transpose(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    before = names(rank)
    after = list(before)
    if rank:
        first, second = (positive(argument(node, index, name), rank) for index, name in ((1, "dim0"), (2, "dim1")))
        after[first], after[second] = before[second], before[first]
    return _linear(before, after)


def _matrix_transpose(node: fx.Node) -> Annotation:
    before = names(rank_of(node))
    return _linear(before, before[::-1])


def _permute(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    before = names(rank)
    return _linear(before, [before[positive(dim, rank)] for dim in argument(node, 1, "dims")])


def _unsqueeze(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    before = names(rank)
    dim = positive(argument(node, 1, "dim"), rank + 1)
    return _linear(before, [*before[:dim], "1", *before[dim:]])


def _squeeze(node: fx.Node) -> Annotation:
    shape = shape_of(graph.inputs(node)[0].fake)
    chosen = dims_of(node, 1, "dim")
    gone = {dim for dim in chosen if shape[dim] == ONE}
    before = ["1" if dim in gone else name for dim, name in enumerate(names(len(shape)))]
    return _linear(before, [name for dim, name in enumerate(before) if dim not in gone])


def _expand(node: fx.Node) -> Annotation:
    """A broadcast dim becomes a factor of its own: every shard repeats the same elements."""
    before, after = shape_of(graph.inputs(node)[0].fake), shape_of(graph.outputs(node)[0].fake)
    new = len(after) - len(before)
    output = names(len(after))
    source = ["1" if before[dim] == ONE != after[dim + new] else output[dim + new] for dim in range(len(before))]
    if operands(node) == 2:  # expand_as: the second operand lends its shape
        return Annotation(f"{' '.join(source)}, {' '.join(output)} -> {' '.join(output)}", linear=((0,),))
    return _linear(source, output)


def _split(node: fx.Node) -> Annotation:
    """Equal pieces share their factor: a shard of the whole, taken inside every piece, splits into shards."""
    rank = rank_of(node)
    dim = positive(argument(node, 2, "dim", 0), rank)
    before = names(rank)
    pieces = [shape_of(value.fake)[dim] for value in graph.outputs(node)]
    if len(set(pieces)) == 1 and pieces[0] is not None:
        output = list(before)
        output[dim] = "n"
        before[dim] = "(^c n)"
        outputs = [" ".join(output)] * len(pieces)
        sizes = {"c": Extent(len(pieces)), "n": pieces[0]}
    else:
        before[dim] = "_"
        outputs = [" ".join(before)] * len(pieces)
        sizes = {}
    return Annotation(f"{' '.join(before)} -> {', '.join(outputs)}", linear=((0,),), sizes=sizes)


def _gated(node: fx.Node) -> Annotation:
    """``glu``: the first half of a dim times the sigmoid of the second, so that a shard has its part of both."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim", -1), rank)
    before, after = names(rank), names(rank)
    before[dim], after[dim] = "(^c n)", "n"
    half = extent(graph.outputs(node)[0].fake.shape[dim])
    if half is None:
        before[dim] = after[dim] = "_"
    sizes = {} if half is None else {"c": Extent(2), "n": half}
    return Annotation(f"{' '.join(before)} -> {' '.join(after)}", sizes=sizes)


def _slice(node: fx.Node) -> Annotation:
    """The whole dim, one of its equal blocks (rotary embeddings take halves), or a frozen dim."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim", 0), rank)
    start, step = argument(node, 2, "start"), argument(node, 4, "step", 1)
    before = names(rank)
    after = list(before)
    whole = extent(graph.inputs(node)[0].fake.shape[dim])
    part = extent(graph.outputs(node)[0].fake.shape[dim])
    if whole is not None and whole == part and step == 1:
        return _linear(before, after)
    count = None if whole is None or part is None else whole.over(part)
    static = whole is not None and not whole.batched and isinstance(start, int | None) and step == 1
    if static and whole is not None and part is not None and count is not None:
        first = min(max(_from_left(start or 0, whole.coefficient), 0), whole.coefficient)
        if first % part.coefficient == 0:
            before[dim], after[dim] = "(^c n)", "n"
            return _linear(before, after, {"c": count, "n": part})
    before[dim] = after[dim] = "_"
    return _linear(before, after)


def _from_left(index: int, size: int) -> int:
    return index + size if index < 0 else index


def _select(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim"), rank)
    before = names(rank)
    return _linear([*before[:dim], "_", *before[dim + 1 :]], [*before[:dim], *before[dim + 1 :]])


def _unbind(node: fx.Node) -> Annotation:
    """One piece for every index of the dim, without it."""
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim", 0), rank)
    before = names(rank)
    piece = " ".join([*before[:dim], *before[dim + 1 :]])
    before[dim] = "_"
    pieces = ", ".join([piece] * len(graph.outputs(node)))
    return Annotation(f"{' '.join(before)} -> {pieces}", linear=((0,),))


def _cat(node: fx.Node) -> Annotation | None:
    """Operands of the same size share their factor, as in :func:`_split`. Empty vectors join with anything."""
    shapes = [shape_of(value.fake) for value in graph.inputs(node)]
    rank = graph.outputs(node)[0].fake.dim()
    empty = [len(shape) == 1 < rank for shape in shapes]
    dim = positive(argument(node, 1, "dim", 0), rank)
    pieces = {shape[dim] for shape, hole in zip(shapes, empty, strict=True) if not hole}
    size = pieces.pop() if len(pieces) == 1 else None
    part, whole = names(rank), names(rank)
    sizes: dict[str, Extent] = {}
    if size is not None:
        part[dim], whole[dim] = "n", "(^c n)"
        sizes = {"c": Extent(empty.count(False)), "n": size}
    else:
        part[dim] = whole[dim] = "_"
    terms = ["_" if hole else " ".join(part) for hole in empty]
    group = tuple(index for index, hole in enumerate(empty) if not hole)
    return Annotation(f"{', '.join(terms)} -> {' '.join(whole)}", linear=(group,), sizes=sizes)


def _differences(node: fx.Node) -> Annotation:
    """Of neighbours along a dim; what is put before and behind is as large in all others."""
    before = names(rank_of(node))
    before[positive(argument(node, 2, "dim", -1), len(before))] = "_"
    text, count = " ".join(before), operands(node)
    return Annotation(f"{', '.join([text] * count)} -> {text}", linear=(tuple(range(count)),))


def _stack(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    dim = positive(argument(node, 1, "dim", 0), rank + 1)
    before = names(rank)
    text = ", ".join([" ".join(before)] * operands(node))
    after = " ".join([*before[:dim], "_", *before[dim:]])
    return Annotation(f"{text} -> {after}", linear=(tuple(range(operands(node))),))


def _repeat(node: fx.Node) -> Annotation:
    """``repeat``: the copies stand outside the dim."""
    before = names(rank_of(node))
    counts = argument(node, 1, "repeats")
    new = len(counts) - len(before)
    after, sizes = [], {}
    for index, count in enumerate(counts):
        number = extent(count.meta["val"] if isinstance(count, fx.Node) else count)
        copies = f"r{index}"
        if number == ONE and index >= new:
            after.append(before[index - new])
            continue
        if number is None:
            copies = f"^{copies}"
        else:
            sizes[copies] = number
        after.append(copies if index < new else f"({copies} {before[index - new]})")
    return _linear(before, after, sizes)


def _repeat_interleave(node: fx.Node) -> Annotation | None:
    """With one count for all elements the copies stand inside the dim, without a dim inside one of all elements; a
    dim with a count for each of its own is whole.
    """
    dim = argument(node, 2, "dim")
    repeats = argument(node, 1, "repeats")
    before = names(rank_of(node))
    if isinstance(repeats, fx.Node) and graph.is_tensor(repeats) and dim is not None:
        before[positive(dim, len(before))] = "_"
        line = " ".join(before)
        return Annotation(f"{line}, {'_' * rank_of(node, 1)} -> {line}", linear=((0,),))
    if not isinstance(repeats, int):
        return None
    if dim is None:
        return _linear(before, [f"({' '.join([*before, 'r'])})"], {"r": Extent(repeats)})
    after = list(before)
    dim = positive(dim, len(before))
    after[dim] = f"({before[dim]} r)"
    return _linear(before, after, {"r": Extent(repeats)})


def _frozen_dims(node: fx.Node, dims: Sequence[int]) -> Annotation:
    frozen = ["^" + name if dim in dims else name for dim, name in enumerate(names(rank_of(node)))]
    return _linear(frozen, frozen)


def _flip(node: fx.Node) -> Annotation:
    return _frozen_dims(node, dims_of(node, 1, "dims"))


def _roll(node: fx.Node) -> Annotation | None:
    return _frozen_dims(node, dims_of(node, 2, "dims")) if argument(node, 2, "dims") else None


def _sliding(node: fx.Node) -> Annotation:
    """``x.unfold(dim, size, step)``: the dim becomes windows, whose elements are a new last dim."""
    terms = names(rank_of(node))
    terms[positive(argument(node, 1, "dimension"), len(terms))] = "_"
    text = " ".join(terms)
    return Annotation(f"{text} -> {text} _", linear=((0,),))


def _strided(node: fx.Node) -> Annotation | None:
    """``as_strided`` of numbers in a row (:mod:`autopart.passes.strided`), of which each first index has its own."""
    row, shape = shape_of(graph.inputs(node)[0].fake), shape_of(graph.outputs(node)[0].fake)
    steps = argument(node, 2, "stride")
    if len(row) != 1 or not shape or len(node.args) > 3 or not all(isinstance(step, int) for step in steps):
        return None
    own, rows = Extent(steps[0]), shape[0]
    if row[0] is None or rows is None or rows.times(own) != row[0]:
        return None
    if any(size is None or size.batched for size in shape[1:]):
        return None
    reach = sum((size.coefficient - 1) * step for size, step in zip(shape[1:], steps[1:], strict=True) if size)
    rest = [f"^{name}" for name in names(len(shape))[1:]]
    return _linear(["(g ^r)"], ["g", *rest], {"r": own}) if reach < steps[0] else None


def _windows(node: fx.Node) -> Annotation | None:
    """im2col: space becomes windows, and each channel a window's elements; col2im: back, what overlaps added."""
    if rank_of(node) != (3 if "col2im" in str(node.target) else 4):
        return None
    kernel = argument(node, 2 if "col2im" in str(node.target) else 1, "kernel_size")
    image, columns = "b c _ _", "b (c ^k) _"
    text = f"{columns} -> {image}" if "col2im" in str(node.target) else f"{image} -> {columns}"
    return Annotation(text, linear=((0,),), sizes={"k": Extent(kernel[0] * kernel[1])})


def _triangle(node: fx.Node) -> Annotation:
    return Annotation("*b ^m ^n -> *b ^m ^n", linear=((0,),))


def _diagonal(node: fx.Node) -> Annotation:
    rank = rank_of(node)
    first, second = (
        positive(argument(node, index, name, default), rank)
        for index, name, default in ((2, "dim1", 0), (3, "dim2", 1))
    )
    before = ["_" if dim in (first, second) else name for dim, name in enumerate(names(rank))]
    return _linear(before, [*(name for name in before if name != "_"), "_"])


def _diagonal_embedded(node: fx.Node) -> Annotation:
    """The last dim becomes the diagonal of two."""
    *free, last = names(rank_of(node))
    dims = [argument(node, 2, "dim1", -2), argument(node, 3, "dim2", -1)]
    after = list(free)
    for dim in sorted(positive(dim, len(free) + 2) for dim in dims):
        after.insert(dim, "_")
    return _linear([*free, f"^{last}"], after)


def _diagonal_placed(node: fx.Node) -> Annotation:
    """``diagonal_scatter``: ``src`` replaces a diagonal of two frozen dims."""
    rank = rank_of(node)
    dims = [positive(argument(node, at, name, at - 3), rank) for at, name in ((3, "dim1"), (4, "dim2"))]
    whole = [f"^{name}" if dim in dims else name for dim, name in enumerate(names(rank))]
    part = [name for dim, name in enumerate(whole) if dim not in dims]
    text = f"{' '.join(whole)}, {' '.join([*part, '_'])} -> {' '.join(whole)}"
    return Annotation(text, linear=((0, 1),))


def _renormed(node: fx.Node) -> str:
    """Each slice along ``dim`` by its own norm."""
    dim = positive(argument(node, 2, "dim"), rank_of(node))
    line = " ".join(name if index == dim else f"^{name}" for index, name in enumerate(names(rank_of(node))))
    return f"{line} -> {line}"


def _pieces(node: fx.Node) -> Annotation:
    """``tensor_split``: pieces that may differ by one."""
    before = names(rank_of(node))
    before[positive(argument(node, 2, "dim", 0), len(before))] = "_"
    line = " ".join(before)
    return Annotation(f"{line} -> {', '.join([line] * len(graph.outputs(node)))}", linear=((0,),))


def _pad(node: fx.Node) -> Annotation:
    """Dims that grow are frozen; filled with anything but zero the op is no longer linear."""
    before, after = shape_of(graph.inputs(node)[0].fake), shape_of(graph.outputs(node)[0].fake)
    padding = argument(node, 1, "pad")
    touched = {len(before) - 1 - index // 2 for index, width in enumerate(padding) if width != 0}
    terms = ["_" if dim in touched else name for dim, name in enumerate(names(len(before)))]
    plain = "constant_pad_nd" in str(node.target)
    mode = "constant" if plain else argument(node, 2, "mode", "constant")
    value = argument(node, 2, "value", 0) if plain else argument(node, 3, "value", None)
    linear = ((0,),) if mode != "constant" or not value else ()
    assert len(after) == len(before)
    return Annotation(f"{' '.join(terms)} -> {' '.join(terms)}", linear=linear)


def _scatter_into(node: fx.Node) -> Annotation:
    """slice_scatter and select_scatter: ``src`` replaces a part of ``self`` along a frozen dim."""
    select = "select" in str(node.target)
    rank = rank_of(node)
    dim = positive(argument(node, 2, "dim", 0), rank)
    whole = names(rank)
    whole[dim] = "^w"
    part = [*whole[:dim], *([] if select else ["_"]), *whole[dim + 1 :]]
    return Annotation(f"{' '.join(whole)}, {' '.join(part)} -> {' '.join(whole)}", linear=((0, 1),))


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        "aten.reshape.default": _reshape,
        "aten.view.default": _reshape,
        "aten._unsafe_view.default": _reshape,
        "aten.transpose.int": _transpose,
        "aten.t.default": _matrix_transpose,
        "aten.permute.default": _permute,
        "aten.unsqueeze.default": _unsqueeze,
        "aten.squeeze.default": _squeeze,
        "aten.squeeze.dim": _squeeze,
        "aten.squeeze.dims": _squeeze,
        "aten.expand.default": _expand,
        "aten.as_strided.default": _strided,
        "aten.expand_as.default": _expand,
        "aten.split_with_sizes.default": _split,
        "aten.glu.default": _gated,
        "aten.slice.Tensor": _slice,
        "aten.select.int": _select,
        "aten.unbind.int": _unbind,
        "aten.cat.default": _cat,
        "aten.stack.default": _stack,
        "aten.diff.default": _differences,
        "aten.repeat.default": _repeat,
        "aten.repeat_interleave.self_int": _repeat_interleave,
        "aten.repeat_interleave.self_Tensor": _repeat_interleave,
        "aten.diag_embed.default": _diagonal_embedded,
        "aten.diagonal_scatter.default": _diagonal_placed,
        "aten.renorm.default": _renormed,
        "aten.tensor_split.sections": _pieces,
        "aten.tensor_split.indices": _pieces,
        "aten.channel_shuffle.default": Annotation("b ^c *s -> b ^c *s", linear=((0,),)),
        "aten.fliplr.default": Annotation("b ^c *s -> b ^c *s", linear=((0,),)),
        "aten.flipud.default": Annotation("^b *s -> ^b *s", linear=((0,),)),
        "aten.flip.default": _flip,
        "aten.roll.default": _roll,
        "aten.tril.default": _triangle,
        "aten.triu.default": _triangle,
        "aten.diagonal.default": _diagonal,
        "aten.unfold.default": _sliding,
        "aten.im2col.default": _windows,
        "aten.col2im.default": _windows,
        "aten.pad.default": _pad,
        "aten.constant_pad_nd.default": _pad,
        "aten.slice_scatter.default": _scatter_into,
        "aten.select_scatter.default": _scatter_into,
    }

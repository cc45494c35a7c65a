"""How the size arguments of an op shrink on one rank.

Most ops read sizes from their operands. The few that name sizes (reshape, expand, full, split, slice, repeat,
grouped convolutions) are rewritten here from the local sizes of their rule's factors.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, positive, rank_of, replaced
from autopart.passes.rules.book import Arguments, Local, Localizer, shape_of
from autopart.passes.sizes import ONE

_TO_THE_END = 2**63 - 1


def _reshape(node: fx.Node, local: Local) -> Arguments | None:
    """Static entries are written out. At most one dim can hold the batch size; if that one shrank it becomes -1."""
    whole, entries = shape_of(graph.outputs(node)[0].fake), list(argument(node, 1, "shape"))
    sizes: list[Any] = []
    for entry, before, after in zip(entries, whole, local.outputs[0], strict=True):
        if after is None:
            sizes.append(entry)
        elif not after.batched:
            sizes.append(after.coefficient)
        else:
            sizes.append(entry if after == before else -1)
    name = "shape" if "reshape" in str(node.target) else "size"
    return replaced(node, 1, name, sizes) if sizes.count(-1) <= 1 else None


def _sizes_at(index: int, name: str) -> Localizer:
    """Ops whose argument at ``index`` is the output's shape. -1 keeps a dim of expand; batch-sized entries stay."""

    def rewrite(node: fx.Node, local: Local) -> Arguments | None:
        whole, entries = shape_of(graph.outputs(node)[0].fake), list(argument(node, index, name))
        sizes: list[Any] = []
        for entry, before, after in zip(entries, whole, local.outputs[0], strict=True):
            if entry == -1 or after == before:
                sizes.append(entry)
            elif after is None or after.batched:
                return None
            else:
                sizes.append(after.coefficient)
        return replaced(node, index, name, sizes)

    return rewrite


def _split(node: fx.Node, local: Local) -> Arguments | None:
    dim = positive(argument(node, 2, "dim", 0), rank_of(node))
    pieces = [shape[dim] for shape in local.outputs]
    if not local.changed(local.rule.outputs[0][dim]):
        return tuple(node.args), dict(node.kwargs)
    if any(piece is None or piece.batched for piece in pieces):
        return None
    return replaced(node, 1, "split_sizes", [piece.coefficient for piece in pieces if piece is not None])


def _slice(node: fx.Node, local: Local) -> Arguments | None:
    """A whole dim is sliced to its end; a block starts and ends at its share of the whole block's bounds."""
    dim = positive(argument(node, 1, "dim", 0), rank_of(node))
    whole, part = shape_of(graph.inputs(node)[0].fake)[dim], shape_of(graph.outputs(node)[0].fake)[dim]
    if not local.changed(local.rule.outputs[0][dim]):
        return tuple(node.args), dict(node.kwargs)
    after = local.outputs[0][dim]
    tensor = node.args[0]
    if whole == part:
        return (tensor, dim, 0, _TO_THE_END), {}
    if whole is None or part is None or after is None or after.batched:
        return None
    start = argument(node, 2, "start") or 0
    first = start + whole.coefficient if start < 0 else start
    block = first // part.coefficient
    return (tensor, dim, block * after.coefficient, (block + 1) * after.coefficient), {}


def _repeat(node: fx.Node, local: Local) -> Arguments | None:
    counts = []
    for index, count in enumerate(argument(node, 1, "repeats")):
        name = f"r{index}"
        if name not in local.sizes or not local.changed((name,)):
            counts.append(count)
            continue
        size = local.sizes[name]
        if size is None or size.batched:
            return None
        counts.append(size.coefficient)
    return replaced(node, 1, "repeats", counts)


def _repeat_interleave(node: fx.Node, local: Local) -> Arguments | None:
    size = local.sizes["r"]
    assert size is not None
    _, kwargs = replaced(node, 1, "repeats", size.coefficient)
    args, _ = replaced(node, 1, "repeats", size.coefficient)
    # The output's size, if given, is only a hint that would have to shrink too.
    return args, {key: value for key, value in kwargs.items() if key != "output_size"}


def _convolution(node: fx.Node, local: Local) -> Arguments | None:
    groups = local.sizes.get("g", ONE)
    assert groups is not None
    if groups == ONE and argument(node, 6, "groups", 1) == 1:
        return tuple(node.args), dict(node.kwargs)
    return replaced(node, 6, "groups", groups.coefficient)


def _group_norm(node: fx.Node, local: Local) -> Arguments | None:
    groups = local.sizes["g"]
    assert groups is not None
    return replaced(node, 1, "num_groups", groups.coefficient)


def _grid(node: fx.Node, local: Local) -> Arguments | None:
    """The sizes begin with the number of samples."""
    (samples, *_), sizes = local.outputs[0], list(argument(node, 1, "size"))
    if not local.changed(local.rule.outputs[0][0]):
        return tuple(node.args), dict(node.kwargs)
    return None if samples is None or samples.batched else replaced(node, 1, "size", [samples.coefficient, *sizes[1:]])


def localizers() -> dict[str, Localizer]:
    """The rewrites of this file by op name."""
    return {
        "aten.reshape.default": _reshape,
        "aten.view.default": _reshape,
        "aten._unsafe_view.default": _reshape,
        "aten.expand.default": _sizes_at(1, "size"),
        "aten.as_strided.default": _sizes_at(1, "size"),
        "aten.full.default": _sizes_at(0, "size"),
        "aten.zeros.default": _sizes_at(0, "size"),
        "aten.ones.default": _sizes_at(0, "size"),
        "aten.empty.memory_format": _sizes_at(0, "size"),
        **{f"aten.{name}.default": _sizes_at(1, "size") for name in ("new_full", "new_ones", "new_zeros", "new_empty")},
        "aten.split_with_sizes.default": _split,
        "aten.slice.Tensor": _slice,
        "aten.repeat.default": _repeat,
        "aten.group_norm.default": _group_norm,
        "aten.repeat_interleave.self_int": _repeat_interleave,
        **{f"aten.conv{space}d.default": _convolution for space in (1, 2, 3)},
        **{f"aten.conv{space}d.padding": _convolution for space in (1, 2, 3)},
        "aten.conv_transpose1d.default": _convolution,
        **{f"aten.conv_transpose{space}d.input": _convolution for space in (2, 3)},
        "aten.affine_grid_generator.default": _grid,
    }

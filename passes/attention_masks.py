"""Masks of attention that a model writes out, where they say no more than attention's other arguments do.

Run eagerly, transformers leaves a causal mask to attention's kernel, and makes none where all keys are seen; while it
is traced it makes one of ``b s s`` booleans by dozens of ops, with which kernels compute all that is masked too. Such a
mask is taken away again, and so is one of a model's own code, where it

- follows from sizes and numbers in the code alone: not from inputs, nor from parameters, buffers and constant tensors,
  whose values may be others when the program runs, or are not known on meta;
- is the same for every sample of every batch, proven as for shares of the batch (:mod:`autopart.passes.batch`): what is
  computed for a share of one sample is its part of the whole mask. Sizes are the only use of the batch's size;
- masks nothing, or is causal with as many keys as queries, as computed for one sample and, to be sure, for a few: its
  ops are run on the CPU (:mod:`autopart.passes.computed`).

A causal mask of booleans becomes attention's ``is_causal``. One that masks nothing, true everywhere or adding zero to
all scores, goes. What else is added to scores stays, as does a window, and what the results have their shape from.
"""

from __future__ import annotations

import enum
import math
import operator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopart.passes import graph as graphs
from autopart.passes.batch import split_batch
from autopart.passes.batch_totals import SHAPED_LIKE
from autopart.passes.blocks import is_random
from autopart.passes.computed import Block, Computed, NotComputed
from autopart.passes.program import OutputInfo, Program, Role
from autopart.passes.rules import RULES
from autopart.passes.sizes import extents
from autopart.passes.storage import argument, concrete, op_name

aten = torch.ops.aten

_MOST_PAIRS = 1 << 30
"""Of query and key whose masks are computed, each in 2 to 4 ns; a mask of which more are open stays."""
_FEW_PAIRS = 1 << 24
"""In a mask for more samples than the one that decides."""
_BLOCK = 1 << 16
"""Pairs that are computed at a time."""


class MaskKind(enum.Enum):
    """Of masks that attention's other arguments say. FULL: every query sees every key."""

    FULL = "full"
    CAUSAL = "causal"


def simplify_masks(graph: fx.Graph, batch: int) -> None:
    """Takes from attention the masks that can be said without, in place. batch: samples of the example inputs."""
    masks, found = _Masks(graph, batch), list[tuple[fx.Node, MaskKind]]()
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            mask = argument(node, 3, "attn_mask")
            kind = None if mask is None or _gives_shape(node) else masks.kind(mask)
            if kind is MaskKind.FULL or (kind is MaskKind.CAUSAL and _may_be_causal(node)):
                found.append((node, kind))
    for node, kind in found:
        dropout = argument(node, 4, "dropout_p", 0.0)
        rest = (None, dropout, True) if kind is MaskKind.CAUSAL else (None, dropout) if dropout else ()
        node.args = (*node.args[:3], *rest)
        node.kwargs = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
    if found:
        graphs.prune(graph)


def _gives_shape(node: fx.Node) -> bool:
    """Whether attention's result has dims of its mask that its query has not, or none can tell."""
    sizes, own = extents(node.meta["val"]), extents(argument(node, 0, "query").meta["val"])
    return sizes is None or own is None or sizes[:-1] != own[:-1]


def _may_be_causal(node: fx.Node) -> bool:
    """Whether attention has a boolean for each query and key, of which there are as many."""
    query, key, mask = (argument(node, place, name) for place, name in ((0, "query"), (1, "key"), (3, "attn_mask")))
    length = query.meta["val"].shape[-2]
    square = isinstance(length, int) and key.meta["val"].shape[-2] == length
    return square and tuple(mask.meta["val"].shape[-2:]) == (length, length)


class _Masks:
    """What values of a graph say as masks. Each is looked at once, and of several that are made alike one."""

    def __init__(self, graph: fx.Graph, batch: int):
        self.samples = batch
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.known: dict[fx.Node, MaskKind | None] = {}
        self.alike: dict[str, MaskKind | None] = {}

    def kind(self, mask: fx.Node) -> MaskKind | None:
        """None: more than this module has words for."""
        if mask not in self.known:
            made = self.alone(mask)
            text = str(made)
            if text not in self.alike:
                self.alike[text] = None if made is None or not _same_for_all(made) else _kind_of(made, self.samples)
            self.known[mask] = self.alike[text]
        return self.known[mask]

    def alone(self, mask: fx.Node) -> fx.Graph | None:
        """The ops that make a mask; None where it follows from more than sizes and numbers."""
        needed: set[fx.Node] = set()
        waiting = [mask]
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            if not _is_known(node):
                return None
            needed.add(node)
            waiting += [] if op_name(node) in SHAPED_LIKE else node.all_input_nodes
        new = fx.Graph()
        batch = new.placeholder("b")
        batch.meta.update(role=Role.BATCH, name="b", path="", source="", val=None)
        env: dict[fx.Node, fx.Node] = {}
        for node in sorted(needed, key=self.places.__getitem__):
            if node.op == "placeholder":
                env[node] = batch
            elif op_name(node) in SHAPED_LIKE:
                filled = _filled(new, batch, node)
                if filled is None:
                    return None
                env[node] = filled
            else:
                # not copied with its name, by which masks that are made alike would differ
                args: Any = fx.node.map_arg(node.args, env.__getitem__)
                kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
                env[node] = new.call_function(graphs.called(node), args, kwargs)
            env[node].meta = {**node.meta}
        new.output((env[mask],))
        return new


def _is_known(node: fx.Node) -> bool:
    """Whether a value follows from what the op reads, of which the batch's size is no number but that of rows."""
    if _is_size(node) or graphs.is_getitem(node):
        return True
    target = node.target
    if not (isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and graphs.is_op(node)):
        return False
    counts = any(isinstance(item, fx.Node) and _is_size(item) for item in (*node.args, *node.kwargs.values()))
    if is_random(node) or op_name(node).startswith(("empty", "new_empty")):
        return False
    return not counts or target is aten.arange.default


def _is_size(node: fx.Node) -> bool:
    """Whether it is the batch's size or a multiple of that."""
    if node.target is operator.mul:
        return all(isinstance(factor, int) or _is_size(factor) for factor in graphs.arguments(node))
    return node.op == "placeholder" and node.meta["role"] is Role.BATCH


def _filled(graph: fx.Graph, batch: fx.Node, node: fx.Node) -> fx.Node | None:
    """In place of an op that takes a tensor's shape one that is given it; None where a size is not known."""
    value, sizes = node.meta["val"], extents(node.meta["val"])
    number: Any = SHAPED_LIKE[op_name(node)]
    if number is None:
        number = node.kwargs.get("fill_value", node.args[-1])
    if sizes is None or isinstance(number, fx.Node):
        return None
    listed = [
        graph.call_function(operator.mul, (size.coefficient, batch)) if size.batched else size.coefficient
        for size in sizes
    ]
    return graph.call_function(aten.full.default, (listed, number), {"dtype": value.dtype})


def _same_for_all(made: fx.Graph) -> bool:
    """Whether a mask for one sample is that of each sample of any batch."""
    (mask,) = graphs.results(made)
    program = Program(
        name="",
        graph=made,
        tensors={},
        inputs=(),
        input_names=(),
        outputs=(OutputInfo("mask", mask),),
        output_structure=None,
        updated_buffers=(),
        loss=None,
        batch=1,
    )
    split = split_batch(program, RULES)
    return not split.flaw and split.combine["mask"].kind in ("cat", "same")


def _kind_of(made: fx.Graph, samples: int) -> MaskKind | None:
    """The mask's kind for one sample, if it is that for two, three and the example's too, where it is not large."""
    (mask,), (batch,) = graphs.results(made), made.find_nodes(op="placeholder")
    pairs = concrete(mask.meta["val"].shape, 1)
    several = {2, 3, samples} if batch.users and pairs is not None else {}
    sure = [count for count in sorted(several) if count * math.prod(pairs or ()) <= _FEW_PAIRS]
    # a model may be captured where all tensors are fake
    with unset_fake_temporarily(), torch.no_grad(), suppress(NotComputed):
        kind = _first_guess(mask)
        if kind is not None and all(_is_of_kind(mask, kind, count) for count in (1, *sure)):
            return kind
    return None


def _first_guess(mask: fx.Node) -> MaskKind | None:
    """By what the first query may see of the last key."""
    computed = Computed(1)
    *_, rows, columns = (1, 1, *computed.shape(mask.meta["val"]))
    if not rows or not columns:
        return None
    corner = computed.block(mask, Block(0, 1, columns - 1, columns))
    if _masks_nothing(corner):
        return MaskKind.FULL
    return MaskKind.CAUSAL if _is_bool(mask) and rows == columns else None


def _masks_nothing(part: Tensor) -> bool:
    """Whether it is true everywhere, or adds zero."""
    return bool((part if part.dtype == torch.bool else part == 0).all())


def _is_of_kind(mask: fx.Node, kind: MaskKind, samples: int) -> bool:
    """Whether a mask for so many samples is of that kind. A causal one is true where a key is no later than its
    query, and nowhere else.

    Bounds decide of large blocks. Where they leave it open, as on the diagonal, its quarters are looked at, and in the
    end computed.
    """
    computed = Computed(samples)
    *lead, length, width = (1, 1, *computed.shape(mask.meta["val"]))
    side, left = max(2, math.isqrt(_BLOCK // max(1, math.prod(lead)))), _MOST_PAIRS
    waiting = [Block(0, length, 0, width)]
    while waiting:
        at = waiting.pop()
        bounds = computed.bounds(mask, at)
        all_seen, some_seen = bounds.truth() if _is_bool(mask) else (bounds == (0, 0), bounds.low <= 0 <= bounds.high)
        if (not some_seen and _wants(kind, at, seen=True)) or (all_seen and _wants(kind, at, seen=False)):
            return False
        if (all_seen and not _wants(kind, at, seen=False)) or (not some_seen and not _wants(kind, at, seen=True)):
            continue
        rows, columns = at.bottom - at.top, at.right - at.left
        if max(rows, columns) > side:
            down, across = at.top + (rows + 1) // 2, at.left + (columns + 1) // 2
            waiting += [
                Block(top, bottom, first, last)
                for top, bottom in ((at.top, down), (down, at.bottom))
                for first, last in ((at.left, across), (across, at.right))
                if top < bottom and first < last
            ]
            continue
        found = computed.block(mask, at)
        left -= found.numel()
        if left < 0:
            raise NotComputed
        if kind is MaskKind.FULL and not _masks_nothing(found):
            return False
        if kind is MaskKind.CAUSAL:
            causal = torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril(at.top - at.left)
            if not found.equal(causal.expand_as(found)):
                return False
    return True


def _wants(kind: MaskKind, at: Block, *, seen: bool) -> bool:
    """Whether some query of the block is to see some key of it, or not to see it."""
    if kind is MaskKind.FULL:
        return seen
    return at.left <= at.bottom - 1 if seen else at.right - 1 > at.top


def _is_bool(mask: fx.Node) -> bool:
    found: bool = mask.meta["val"].dtype == torch.bool
    return found

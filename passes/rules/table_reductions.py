"""Rules of reductions, normalisations, pooling and losses.

Only a plain sum lets a shard of the reduced factor become a partial sum; all other reductions freeze it. ``mean`` is
linear, so partial sums pass through it, but the mean of a shard is not a part of the whole mean's sum.
"""

from __future__ import annotations

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, dims_of, names, operands, rank_of, words
from autopart.passes.rules.book import Entry
from autopart.passes.rules.notation import Annotation, LocalForm, Message


def _reduction(node: fx.Node, dims: list[int], keep: bool, freeze: bool) -> str:
    """The text of a reduction over ``dims``, the same for every output."""
    before = names(rank_of(node))
    after = [("1" if dim in dims else name) for dim, name in enumerate(before) if keep or dim not in dims]
    marked = [f"^{name}" if freeze and dim in dims else name for dim, name in enumerate(before)]
    outputs = ", ".join([" ".join(after)] * len(graph.outputs(node)))
    return f"{' '.join(marked)} -> {outputs}"


def _keepdim(node: fx.Node) -> bool:
    """Whether reduced dims are kept, read off the shapes: schemas place the argument differently."""
    before, after = rank_of(node), graph.outputs(node)[0].fake.dim()
    return before > 0 and before == after


def _sum(node: fx.Node) -> Annotation:
    dims = dims_of(node, 1, "dim")
    return Annotation(_reduction(node, dims, _keepdim(node), freeze=False), linear=((0,),))


def _mean(node: fx.Node) -> Annotation:
    dims = dims_of(node, 1, "dim")
    return Annotation(_reduction(node, dims, _keepdim(node), freeze=True), linear=((0,),))


def _frozen_reduction(node: fx.Node) -> str:
    """Reductions over ``dim`` (an int, a list, or all dims) that are not sums."""
    return _reduction(node, dims_of(node, 1, "dim"), _keepdim(node), freeze=True)


def _vector_norm(node: fx.Node) -> str:
    return _reduction(node, dims_of(node, 2, "dim"), _keepdim(node), freeze=True)


def _full_reduction(node: fx.Node) -> str:
    """Reductions of all elements to one: sums freeze nothing, and are not listed here."""
    return "^*d -> " + ", ".join([""] * len(graph.outputs(node)))


def _along(node: fx.Node) -> str:
    """Softmax and its like: ``dim`` is frozen, all others are independent."""
    (dim,) = dims_of(node, 1, "dim")
    dims = " ".join(f"^{name}" if index == dim else name for index, name in enumerate(names(rank_of(node))))
    return f"{dims} -> " + ", ".join([dims] * len(graph.outputs(node)))


def _cumulative_sum(node: fx.Node) -> Annotation:
    return Annotation(_along(node), linear=((0,),))


def _layer_norm(node: fx.Node) -> str:
    """layer_norm and rms_norm: the normalised dims are frozen, weights have exactly those."""
    count = len(argument(node, 1, "normalized_shape"))
    normal = " ".join(f"^n{index}" for index in range(count))
    return ", ".join([f"*b {normal}", *[normal] * (operands(node) - 1)]) + f" -> *b {normal}"


def _group_norm(node: fx.Node) -> str:
    return ", ".join(["b ^c ^*s", *["^c"] * (operands(node) - 1)]) + " -> b ^c ^*s"


def _batch_norm(node: fx.Node) -> str:
    """Channels are independent, running statistics included. In training the batch and space are one sample."""
    training = bool(argument(node, 5, "training"))
    data = "^b c ^*s" if training else "b c *s"
    return ", ".join([data, *["c"] * (operands(node) - 1)]) + f" -> {data}"


def _pool(space: int) -> Entry:
    hole = " ".join(["_"] * space)
    return f"*b {hole} -> *b {hole}"


def _linear_pool(space: int) -> Entry:
    hole = " ".join(["_"] * space)
    return Annotation(f"*b {hole} -> *b {hole}", linear=((0,),))


def _pool_with_indices(node: fx.Node) -> str:
    return "*b _ _ -> *b ^y ^x, *b ^y ^x"


_NONE, _MEAN = 0, 1


def _cross_entropy(node: fx.Node) -> Annotation:
    """Samples are summed, or frozen where their mean is taken over the valid ones; classes run by a local form."""
    reduction = argument(node, 3, "reduction", _MEAN)
    text = _class_loss(node, reduction)
    rank = rank_of(node)
    numbered = rank > 1 and rank_of(node, 1) == rank - 1
    if not numbered or operands(node) > 2 or not isinstance(argument(node, 4, "ignore_index", -100), int):
        return Annotation(text)
    scores = graph.inputs(node)[0].fake.dtype
    size = max(scores.itemsize, 4)  # half precision is computed in float32
    sums = 3 if argument(node, 5, "label_smoothing", 0.0) else 2
    samples = tuple(f"s{index}" for index in range(rank - 2))
    messages = tuple(Message("all_reduce", "forward", ("t", *samples), count * size) for count in (1, sums))
    form = LocalForm("vocab_cross_entropy", whole=True, messages=messages)
    return Annotation(text.replace("^c", "c"), forms={"c": form})


def _class_loss(node: fx.Node, reduction: int) -> str:
    """``[n, c, …]`` or ``[c]`` scores; targets are class numbers without c, or probabilities with it."""
    rank = rank_of(node)
    mark = "^" if reduction == _MEAN else ""
    lead = f"{mark}t" if rank > 1 else ""
    rest = " ".join(f"{mark}s{index}" for index in range(rank - 2))
    scores = f"{lead} ^c {rest}"
    target = scores if rank_of(node, 1) == rank else f"{lead} {rest}"
    weights = ", ^c" * (operands(node) - 2)
    output = f"{lead} {rest}" if reduction == _NONE else ""
    return f"{scores}, {target}{weights} -> {output}"


def _nll(node: fx.Node) -> Annotation:
    """Picks one log-probability per sample: linear in them."""
    return Annotation(_class_loss(node, argument(node, 3, "reduction", _MEAN)), linear=((0,),))


def _elementwise_loss(position: int) -> Entry:
    """A loss of two tensors and weights, element by element, then ``reduction`` (the argument at ``position``)."""

    def build(node: fx.Node) -> str:
        reduction = argument(node, position, "reduction", _MEAN)
        mark = "^" if reduction == _MEAN else ""
        return ", ".join([f"{mark}*d"] * operands(node)) + (f" -> {mark}*d" if reduction == _NONE else " -> ")

    return build


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    frozen = words(
        "amax amin argmax argmin logsumexp prod.dim_int any.dim any.dims all.dim all.dims max.dim min.dim median.dim "
        "var.correction std.correction var_mean.correction std_mean.correction var.dim std.dim "
        "count_nonzero.dim_IntList"
    )
    full = words("max min any all prod median count_nonzero var std")
    along = words("softmax.int log_softmax.int _softmax _log_softmax cumprod cummax cummin logcumsumexp")

    def key(name: str) -> str:
        return f"aten.{name}" if "." in name else f"aten.{name}.default"

    return {
        "aten.sum.default": Annotation("*d -> ", linear=((0,),)),
        "aten.sum.dim_IntList": _sum,
        "aten.mean.default": Annotation("^*d -> ", linear=((0,),)),
        "aten.mean.dim": _mean,
        **{key(name): _frozen_reduction for name in frozen},
        **{key(name): _full_reduction for name in full},
        "aten.linalg_vector_norm.default": _vector_norm,
        "aten.norm.ScalarOpt_dim": _vector_norm,
        **{key(name): _along for name in along},
        "aten.cumsum.default": _cumulative_sum,
        "aten.layer_norm.default": _layer_norm,
        "aten.rms_norm.default": _layer_norm,
        "aten.group_norm.default": _group_norm,
        "aten.batch_norm.default": _batch_norm,
        "aten.max_pool1d.default": _pool(1),
        "aten.max_pool2d.default": _pool(2),
        "aten.max_pool3d.default": _pool(3),
        "aten.max_pool2d_with_indices.default": _pool_with_indices,
        "aten.adaptive_max_pool2d.default": _pool_with_indices,
        "aten.avg_pool1d.default": _linear_pool(1),
        "aten.avg_pool2d.default": _linear_pool(2),
        "aten.avg_pool3d.default": _linear_pool(3),
        "aten.adaptive_avg_pool1d.default": _linear_pool(1),
        "aten.adaptive_avg_pool2d.default": _linear_pool(2),
        "aten.upsample_nearest2d.vec": _linear_pool(2),
        "aten.upsample_bilinear2d.vec": _linear_pool(2),
        "aten.upsample_bicubic2d.vec": _linear_pool(2),
        "aten.cross_entropy_loss.default": _cross_entropy,
        "aten.nll_loss.default": _nll,
        "aten.nll_loss_nd.default": _nll,
        "aten.mse_loss.default": _elementwise_loss(2),
        "aten.l1_loss.default": _elementwise_loss(2),
        "aten.smooth_l1_loss.default": _elementwise_loss(2),
        "aten.huber_loss.default": _elementwise_loss(2),
        "aten.kl_div.default": _elementwise_loss(2),
        "aten.soft_margin_loss.default": _elementwise_loss(2),
        "aten.binary_cross_entropy.default": _elementwise_loss(3),
        "aten.binary_cross_entropy_with_logits.default": _elementwise_loss(4),
    }

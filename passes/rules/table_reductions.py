"""Rules of reductions and pooling.

Only a plain sum lets a shard of the reduced factor become a partial sum; most other reductions freeze it. ``mean`` is
linear, so partial sums pass through it; of a shard its local form makes a summand of the whole mean.
"""

from __future__ import annotations

from functools import partial

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, dims_of, names, operands, positive, rank_of, wide_bytes, words
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
    forms = {f"d{dim}": LocalForm("partial_mean", several=True) for dim in dims}
    return Annotation(_reduction(node, dims, _keepdim(node), freeze=False), linear=((0,),), forms=forms)


def _mean_of_all(node: fx.Node) -> Annotation:
    dims = list(range(rank_of(node)))
    forms = {f"d{dim}": LocalForm("partial_mean", several=True) for dim in dims}
    return Annotation(_reduction(node, dims, False, freeze=False), linear=((0,),), forms=forms)


def _logsumexp(node: fx.Node) -> Annotation:
    """Over a shard: the largest numbers and the sums of exponentials of all ranks."""
    dims = dims_of(node, 1, "dim")
    rest = tuple(name for dim, name in enumerate(names(rank_of(node))) if dim not in dims)
    size = wide_bytes(node)
    form = LocalForm("sharded_logsumexp", whole=True, messages=(Message("all_gather", "forward", rest, 2 * size),))
    return Annotation(_reduction(node, dims, _keepdim(node), freeze=False), forms={f"d{dim}": form for dim in dims})


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


def _pool(space: int) -> Entry:
    hole = " ".join(["_"] * space)
    return f"*b {hole} -> *b {hole}"


def _linear_pool(space: int) -> Entry:
    hole = " ".join(["_"] * space)
    return Annotation(f"*b {hole} -> *b {hole}", linear=((0,),))


def _pool_with_indices(node: fx.Node) -> str:
    return "*b _ _ -> *b ^y ^x, *b ^y ^x"


def _sampled(node: fx.Node) -> Annotation:
    """Pixels of a picture at the places of a grid, of which each is taken by itself."""
    space = rank_of(node) - 2
    hole, places = " ".join("_" * space), " ".join("pqr"[:space])
    return Annotation(f"b c {hole}, b {places} _ -> b c {places}", linear=((0,),))


def _picked(node: fx.Node, position: int) -> str:
    """Numbers of one dim, the last if not given, and where they stand."""
    dim = positive(argument(node, position, "dim", -1), rank_of(node))
    return _reduction(node, [dim], _keepdim(node), freeze=True)


def _grid(node: fx.Node) -> Annotation:
    """The places of pixels, moved by each sample's matrix."""
    rest = " ".join("_" * (graph.outputs(node)[0].fake.dim() - 1))
    return Annotation(f"b _ _ -> b {rest}", linear=((0,),))


def _sorted_rows(node: fx.Node) -> str:
    """Along the first dim."""
    _, *others = names(rank_of(node))
    return f"_ {' '.join(others)} -> _ {' '.join(others)}"


def _aminmax(node: fx.Node) -> str:
    dim = argument(node, 1, "dim")
    dims = list(range(rank_of(node))) if dim is None else [positive(dim, rank_of(node))]
    return _reduction(node, dims, _keepdim(node), freeze=True)


def _quantile(node: fx.Node) -> str:
    """Of one fraction; of several, one result after the other."""
    rank = rank_of(node)
    dim = argument(node, 2, "dim")
    dims = list(range(rank)) if dim is None else [positive(dim, rank)]
    text = _reduction(node, dims, bool(argument(node, 3, "keepdim", False)), freeze=True)
    if operands(node) == 1:
        return text
    several = "_" * rank_of(node, 1)
    return text.replace(" -> ", f", {several} -> {several} ")


def _trapezoid(node: fx.Node) -> Annotation:
    """Areas of neighbours along a dim, summed up or one after the other."""
    rank, cumulative = rank_of(node), "cumulative" in str(node.target)
    before = names(rank)
    after = list(before)
    before[positive(argument(node, 2, "dim", -1), rank)] = "_"
    after[positive(argument(node, 2, "dim", -1), rank)] = "_" * cumulative
    return Annotation(f"{' '.join(before)} -> {' '.join(after)}", linear=((0,),))


def _unpooled(space: int) -> Entry:
    """Numbers go back to where in each picture they were largest."""
    hole = " ".join(["_"] * space)
    return f"*b {' '.join(names(space, '^y'))}, *b {' '.join(names(space, '^y'))} -> *b {hole}"


def _pooled_with_indices(space: int) -> Entry:
    hole, pooled = " ".join(["_"] * space), " ".join(names(space, "^y"))
    return f"*b {hole} -> *b {pooled}, *b {pooled}"


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    frozen = words(
        "amax amin argmax argmin prod.dim_int any.dim any.dims all.dim all.dims max.dim min.dim median.dim "
        "var.correction std.correction var_mean.correction std_mean.correction var.dim std.dim "
        "count_nonzero count_nonzero.dim_IntList nanmedian.dim nanmean nansum std_mean.dim var_mean.dim"
    )
    resized = words("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d")
    resized += words("upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d")
    resized += words("_upsample_bilinear2d_aa _upsample_bicubic2d_aa")
    full = words("max min any all prod median var std")
    along = words("_softmax _log_softmax _safe_softmax cumprod cummax cummin logcumsumexp")

    def key(name: str) -> str:
        return f"aten.{name}" if "." in name else f"aten.{name}.default"

    return {
        "aten.sum.default": Annotation("*d -> ", linear=((0,),)),
        "aten.sum.dim_IntList": _sum,
        "aten.mean.default": _mean_of_all,
        "aten.mean.dim": _mean,
        **{key(name): _frozen_reduction for name in frozen},
        **{key(name): _full_reduction for name in full},
        "aten.logsumexp.default": _logsumexp,
        "aten.linalg_vector_norm.default": _vector_norm,
        "aten.norm.ScalarOpt_dim": _vector_norm,
        **{key(name): _along for name in along},
        "aten.cumsum.default": _cumulative_sum,
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
        **{f"aten.{name}.vec": _linear_pool(int(name.partition("d")[0][-1])) for name in resized},
        "aten.adaptive_avg_pool3d.default": _linear_pool(3),
        **{f"aten.max_pool{space}d_with_indices.default": _pooled_with_indices(space) for space in (1, 3)},
        **{f"aten.adaptive_max_pool{space}d.default": _pooled_with_indices(space) for space in (1, 3)},
        **{f"aten.max_unpool{space}d.default": _unpooled(space) for space in (2, 3)},
        "aten.fractional_max_pool2d.default": "*b _ _, *b _ -> *b ^y ^x, *b ^y ^x",
        # Channels become pixels, or pixels channels.
        "aten.pixel_shuffle.default": _linear_pool(3),
        "aten.pixel_unshuffle.default": _linear_pool(3),
        "aten.grid_sampler.default": _sampled,
        "aten.affine_grid_generator.default": _grid,
        "aten.aminmax.default": _aminmax,
        **{key(name): _quantile for name in words("quantile quantile.scalar nanquantile nanquantile.scalar")},
        "aten.trapezoid.dx": _trapezoid,
        "aten.cumulative_trapezoid.dx": _trapezoid,
        "aten.dist.default": "^*d, ^*d -> ",
        "aten.msort.default": _sorted_rows,
        "aten.kthvalue.default": partial(_picked, position=2),
        "aten.mode.default": partial(_picked, position=1),
    }

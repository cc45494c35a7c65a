"""Example calls of ops that place, pick and pool, and of further products (:mod:`autopart.passes.rules.catalogue`)."""

from __future__ import annotations

import torch

from autopart.passes.rules.examples import F64, Case, f, i, m


def key(name: str) -> str:
    """An op by its name, of the overload that has none if none is given."""
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def placed() -> list[Case]:
    """Elements in other places."""
    few, rows = torch.tensor([0, 3]), torch.tensor([1, 0, 3, 2])
    into = (f(4, 6), 1, i(6, 4, 2), f(4, 2))
    smooth = ("sum", "mean", "amax", "prod")
    return [
        *[Case(key("scatter_reduce.two"), (*into, how), {}, 3 + (how == "sum")) for how in smooth],
        Case(key("scatter_reduce.two"), (*into, "sum"), {"include_self": False}, minimum=3),
        Case(key("scatter.reduce"), into, {"reduce": "add"}, 3, (0, 2)),
        Case(key("scatter.value_reduce"), (*into[:3], 2.0), {"reduce": "multiply"}, 2, (0,)),
        Case(key("index_reduce"), (f(4, 6), 1, i(6, 3), f(4, 3), "amax"), minimum=3),
        Case(key("index_copy"), (f(4, 6), 1, few, f(4, 2)), minimum=4),
        Case(key("index_fill.int_Scalar"), (f(4, 6), 1, few, 0.0), minimum=4),
        Case(key("index_fill.int_Scalar"), (f(4, 6), 1, few, 1.0), minimum=3),
        Case(key("index_fill.int_Tensor"), (f(4, 6), 1, few, f()), minimum=4),
        Case(key("take"), (f(4, 6), i(24, 4, 2)), minimum=5),
        Case(key("take_along_dim"), (f(4, 6), i(6, 4, 2), 1), minimum=5),
        Case(key("take_along_dim"), (f(4, 6, 2), i(6, 1, 4, 2), 1), minimum=5),
        Case(key("take_along_dim"), (f(4, 6), i(24, 4)), minimum=4),
        Case(key("masked_scatter"), (f(4, 6), m(4, 6), f(24)), minimum=2),
        Case(key("repeat_interleave.self_Tensor"), (f(4, 4), rows, 1), {"output_size": 6}, 4),
        Case(key("repeat_interleave.self_int"), (f(4, 6), 2), minimum=5),
        Case(key("diag_embed"), (f(4, 2, 6),), minimum=5),
        Case(key("diag_embed"), (f(4, 6), 1, 0, 2), minimum=4),
        Case(key("diagonal_scatter"), (f(4, 6, 6), f(4, 6), 0, 1, 2), minimum=4),
        Case(key("diagonal_scatter"), (f(6, 6, 4), f(4, 6)), minimum=4),
        Case(key("renorm"), (f(4, 6), 2, 0, 0.5), minimum=3),
        Case(key("tensor_split.sections"), (f(4, 6), 4, 1), minimum=4),
        Case(key("tensor_split.indices"), (f(4, 6), [1, 3], 1), minimum=4),
        Case(key("channel_shuffle"), (f(4, 6, 2, 2), 2), minimum=6),
        *[Case(key(name), (f(4, 6),), minimum=4) for name in ("fliplr", "flipud")],
    ]


def pooled() -> list[Case]:
    """Numbers of many, and pictures."""
    thirds = torch.tensor([0.2, 0.7], dtype=F64)
    places = torch.tensor([0, 3, 9, 14]).reshape(2, 2)
    return [
        Case(key("aminmax"), (f(4, 6),), {"dim": 1}, 3, (0,)),  # torch 2.11 has no gradient of it
        Case(key("aminmax"), (f(4, 6),), {}, 2, (0,)),
        *[Case(key(f"{name}.dim"), (f(4, 6), [1]), minimum=3) for name in ("std_mean", "var_mean")],
        *[Case(key(f"{name}.scalar"), (f(4, 6), 0.3, 1), minimum=3) for name in ("quantile", "nanquantile")],
        *[Case(key(name), (f(4, 6), thirds, 1, True), {}, 3, (1,)) for name in ("quantile", "nanquantile")],
        *[Case(key(name), (f(4, 6),), minimum=4) for name in ("trapezoid.dx", "cumulative_trapezoid.dx")],
        Case(key("dist"), (f(4, 6), f(4, 6)), minimum=2),
        Case(key("msort"), (f(4, 6),), minimum=3),
        Case(key("_safe_softmax"), (f(4, 6), 1), minimum=3),
        Case(key("adaptive_avg_pool3d"), (f(2, 4, 2, 2, 2), [1, 1, 1]), minimum=5),
        Case(key("max_pool1d_with_indices"), (f(2, 4, 6), [2]), minimum=4),
        Case(key("max_pool3d_with_indices"), (f(2, 4, 2, 4, 2), [2, 2, 2]), minimum=4),
        Case(key("adaptive_max_pool1d"), (f(2, 4, 6), [3]), minimum=4),
        Case(key("adaptive_max_pool3d"), (f(2, 4, 2, 4, 2), [1, 2, 1]), minimum=4),
        Case(key("max_unpool2d"), (f(2, 4, 2, 2), places.expand(2, 4, 2, 2).contiguous(), [4, 4]), minimum=4),
        Case(key("max_unpool3d"), _unpooled(places), minimum=4),
        Case(key("fractional_max_pool2d"), (f(2, 4, 6, 6), [2, 2], [3, 3], f(2, 4, 2)), {}, 4, (1,)),
        Case(key("affine_grid_generator"), (f(4, 2, 3), [4, 3, 5, 6], False), minimum=4),
        Case(key("affine_grid_generator"), (f(4, 3, 4), [4, 3, 2, 5, 6], True), minimum=4),
    ]


def _unpooled(places: torch.Tensor) -> tuple[object, ...]:
    return f(2, 4, 1, 2, 2), places.expand(2, 4, 1, 2, 2).contiguous(), [2, 4, 4], [2, 2, 2], [0, 0, 0]


def products() -> list[Case]:
    """Sums of products under further names."""
    return [
        Case(key("einsum"), ("bii->b", [f(4, 6, 6)]), minimum=4),
        Case(key("einsum"), ("bii,ij->bij", [f(4, 6, 6), f(6, 2)]), minimum=5),
        Case(key("tensordot"), (f(4, 6, 2), f(2, 8, 6), [1, 2], [2, 0]), minimum=8),
        Case(key("inner"), (f(4, 6), f(2, 8, 6)), minimum=8),
        Case(key("inner"), (f(4, 6), f(6)), minimum=6),
        Case(key("bilinear"), (f(4, 6), f(4, 2), f(8, 6, 2)), minimum=9),
        Case(key("bilinear"), (f(4, 6), f(4, 2), f(8, 6, 2), f(8)), minimum=9),
        Case(key("addmv"), (f(4), f(4, 6), f(6)), minimum=6),
        Case(key("addmv"), (f(4), f(4, 6), f(6)), {"beta": 2, "alpha": 3}),
        Case(key("addr"), (f(4, 6), f(4), f(6)), minimum=6),
        Case(key("addbmm"), (f(4, 8), f(2, 4, 6), f(2, 6, 8)), minimum=8),
        Case(key("addbmm"), (f(8), f(2, 4, 6), f(2, 6, 8)), minimum=8),
        Case(key("conv_transpose1d"), (f(2, 8, 5), f(8, 2, 3), f(8), [1], [0], [0], 4), minimum=7),
        Case(key("conv_transpose2d.input"), (f(2, 8, 3, 3), f(8, 6, 3, 3), None, [2], [1], [1], 2), minimum=6),
    ]

"""Example calls of every op that has a rule, on which ``autopart rules`` and the tests try them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from autopart.passes.rules.catalogue_elementwise import constants, drawn, special
from autopart.passes.rules.catalogue_matrices import matrices, spectral
from autopart.passes.rules.catalogue_places import placed, pooled, products
from autopart.passes.rules.examples import F64, Case, f, i, m, signs


def _unary() -> list[Case]:
    names = """abs acos asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac
    gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid
    logical_not mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus
    softshrink sqrt square tan tanh trunc neg clone contiguous alias detach lift_fresh_copy zeros_like ones_like
    rand_like randn_like bernoulli angle hardshrink special_entr special_i0 special_log_ndtr special_ndtr"""
    cases = [
        Case(f"aten.{name}.default", (f(4, 6) - (0.5 if name == "relu" else 0),), minimum=4) for name in names.split()
    ]
    return [
        *cases,
        Case("aten.acosh.default", (f(4, 6) + 1,)),
        Case("aten.bitwise_not.default", (m(4, 6),)),
        Case("aten.clamp.default", (f(4, 6), 0.2, 0.5)),
        Case("aten.clamp_min.default", (f(4, 6), 0.5)),
        Case("aten.clamp_max.default", (f(4, 6), 0.5)),
        Case("aten.clamp.Tensor", (f(4, 6), f(6), f(6) + 0.5)),
        Case("aten.threshold.default", (f(4, 6), 0.5, 0.1)),
        Case("aten.bucketize.Tensor", (f(4, 6), torch.tensor([0.2, 0.5, 0.7], dtype=F64))),
        Case("aten.searchsorted.Tensor", (f(4, 6).cumsum(1), f(4, 2)), minimum=3),
        Case("aten.searchsorted.Tensor", (f(6).cumsum(0), f(4, 2)), minimum=3),
        Case("aten.full_like.default", (f(4, 6), 2.0)),
        Case("aten.fill.Scalar", (f(4, 6), 2.0)),
        Case("aten.to.dtype", (f(4, 6), torch.float32), minimum=5),
        Case("aten.to.dtype", (i(3, 4, 6), torch.float64)),
        Case("aten._to_copy.default", (f(4, 6),), {"dtype": torch.float32}),
        Case("aten.dropout.default", (f(4, 6), 0.0, True), minimum=5),
        Case("aten.dropout.default", (f(4, 6), 0.5, True)),
        Case("aten.dropout.default", (f(4, 6), 0.5, False), minimum=5),
        Case("aten.native_dropout.default", (f(4, 6), 0.5, True)),
        Case("aten.copy.default", (f(4, 6), f(6)), minimum=3, constant=(0, 1)),
    ]


def _binary() -> list[Case]:
    floats = """atan2.default maximum.default minimum.default max.other min.other fmod.Tensor remainder.Tensor
    pow.Tensor_Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and.default
    logical_or.default logical_xor.default hypot.default xlogy.Tensor isclose.default logaddexp.default
    copysign.Tensor logaddexp2.default special_xlog1py.default add.Tensor sub.Tensor mul.Tensor div.Tensor"""
    scalars = """fmod.Scalar remainder.Scalar pow.Tensor_Scalar eq.Scalar ne.Scalar lt.Scalar
    le.Scalar gt.Scalar ge.Scalar"""
    bits = "bitwise_and bitwise_or bitwise_xor"
    return [
        *[Case(f"aten.{name}", (f(4, 6), f(6)), minimum=4) for name in floats.split()],
        *[
            Case(f"aten.{name}", (f(4, 1, 6), f(2, 1)), minimum=4)
            for name in ("add.Tensor", "mul.Tensor", "div.Tensor")
        ],
        *[Case(f"aten.{name}", (f(4, 6), 2), minimum=4) for name in scalars.split()],
        *[Case(f"aten.{name}.Tensor", (i(8, 4, 6), i(8, 4, 1))) for name in bits.split()],
        *[Case(f"aten.{name}.Scalar", (i(8, 4, 6), 3)) for name in bits.split()],
        Case("aten.floor_divide.default", (i(8, 4, 6), 2), minimum=3),
        Case("aten.floor_divide.default", (f(4, 6), f(6)), minimum=3, constant=(0, 1)),
        Case("aten.floor_divide.Scalar", (i(8, 4, 6), 2), minimum=3),
        Case("aten.bitwise_left_shift.Tensor", (i(8, 4, 6), i(3, 6))),
        Case("aten.bitwise_right_shift.Tensor", (i(8, 4, 6), i(3, 6))),
        Case("aten.pow.Scalar", (2.0, f(4, 6))),
        Case("aten.add.Tensor", (f(4, 6), 1.5)),
        Case("aten.add.Tensor", (f(4, 6), 0), minimum=5),
        Case("aten.add.Tensor", (f(4, 6), f()), {"alpha": 2}, minimum=5),
        Case("aten.rsub.Tensor", (f(4, 6), f(6)), minimum=5),
        Case("aten.rsub.Scalar", (f(4, 6), 1.0)),
        Case("aten.rsub.Scalar", (f(4, 6), 0), minimum=5),
        Case("aten.mul.Tensor", (f(4, 6), 3.0), minimum=5),
        Case("aten.mul.Tensor", (f(4, 6), m(4, 6)), minimum=5),
        Case("aten.div.Tensor", (f(4, 6), 3.0), minimum=5),
        Case("aten.div.Tensor_mode", (f(4, 6), 0.3), {"rounding_mode": "floor"}),
        Case("aten.where.self", (m(4, 6), f(4, 6), f(6)), minimum=5),
        Case("aten.where.ScalarOther", (m(4, 6), f(4, 6), 0.0), minimum=5),
        Case("aten.where.ScalarOther", (m(4, 6), f(4, 6), 1.0)),
        Case("aten.where.ScalarSelf", (m(4, 6), 0.0, f(4, 6))),
        Case("aten.where.Scalar", (m(4, 6), 0.0, 1.0)),
        Case("aten.masked_fill.Scalar", (f(4, 6), m(4, 6), 0.0), minimum=5),
        Case("aten.masked_fill.Scalar", (f(4, 6), m(1, 6), -1.0)),
        Case("aten.masked_fill.Tensor", (f(4, 6), m(4, 6), f())),
        Case("aten.addcmul.default", (f(4, 6), f(6), f(4, 1)), {"value": 0.5}),
        Case("aten.addcdiv.default", (f(4, 6), f(6), f(4, 1)), {"value": 0.5}),
        Case("aten.lerp.Scalar", (f(4, 6), f(6), 0.3)),
        Case("aten.lerp.Tensor", (f(4, 6), f(6), f(4, 1))),
    ]


def _constants() -> list[Case]:
    plain = {"dtype": F64}
    return [
        Case("aten.full.default", ([4, 6], 2.0), plain, minimum=4),
        Case("aten.zeros.default", ([4, 6],), plain, minimum=4),
        Case("aten.ones.default", ([4, 6],), plain, minimum=4),
        Case("aten.empty.memory_format", ([4, 6],)),
        Case("aten.scalar_tensor.default", (2.0,), plain),
        Case("aten.empty_like.default", (f(4, 6),)),
        Case("aten.new_full.default", (f(3), [4, 6], 1.0), minimum=4),
        Case("aten.new_ones.default", (f(3), [4, 6])),
        Case("aten.new_ones.default", (f(3), []), {"dtype": torch.bool}),
        Case("aten.new_zeros.default", (f(3, 2), [4, 6])),
        Case("aten.new_empty.default", (f(3), [4, 6])),
        Case("aten.arange.default", (6,)),
        Case("aten.arange.start", (2, 6)),
        Case("aten.arange.start_step", (2, 8, 2)),
    ]


def _contractions() -> list[Case]:
    ends, late = (torch.tensor(rows, dtype=torch.int32) for rows in ([2, 3, 3, 8], [0, 0, 3, 6]))
    return [
        Case("aten.linear.default", (f(2, 4, 8), f(6, 8)), minimum=8),
        Case("aten.linear.default", (f(2, 4, 8), f(6, 8), f(6)), minimum=8),
        Case("aten.linear.default", (f(8), f(6, 8), f(6))),
        Case("aten.mm.default", (f(4, 6), f(6, 8)), minimum=7),
        Case("aten.bmm.default", (f(4, 2, 6), f(4, 6, 8)), minimum=7),
        *[Case("aten.addmm.default", (f(*added), f(4, 6), f(6, 8)), minimum=7) for added in ((8,), (4, 8), (1, 8), ())],
        Case("aten.addmm.default", (f(8), f(4, 6), f(6, 8)), {"beta": 2, "alpha": 3}),
        Case("aten.baddbmm.default", (f(4, 2, 8), f(4, 2, 6), f(4, 6, 8)), minimum=7),
        Case("aten.baddbmm.default", (f(2, 8), f(4, 2, 6), f(4, 6, 8))),
        *[
            Case("aten.matmul.default", (f(*left), f(*right)), minimum=4)
            for left, right in (
                ((4, 6), (6, 8)),
                ((6,), (6,)),
                ((6,), (2, 6, 8)),
                ((2, 4, 6), (6,)),
                ((2, 4, 6), (6, 8)),
                ((2, 1, 4, 6), (4, 6, 8)),
            )
        ],
        Case("aten.mv.default", (f(4, 6), f(6))),
        Case("aten.dot.default", (f(6), f(6))),
        Case("aten.outer.default", (f(4), f(6))),
        Case("aten.einsum.default", ("bhqd,bhkd->bhqk", [f(2, 4, 6, 2), f(2, 4, 8, 2)]), minimum=9),
        Case("aten.einsum.default", ("ij,jk", [f(4, 6), f(6, 8)])),
        Case("aten.einsum.default", ("...i,ij->...j", [f(2, 4, 6), f(6, 8)]), minimum=8),
        Case("aten.einsum.default", ("...i,ij", [f(4, 6), f(6, 8)]), minimum=7),
        Case("aten.einsum.default", ("...ij->...ji", [f(2, 4, 6)]), minimum=6),
        Case("aten.conv1d.default", (f(2, 4, 9), f(6, 4, 3), f(6)), minimum=7),
        Case("aten.conv1d.padding", (f(2, 4, 9), f(6, 4, 3), f(6), [1], "same")),
        Case("aten.conv2d.default", (f(2, 4, 8, 8), f(6, 4, 3, 3), f(6), [2, 2], [1, 1]), minimum=7),
        Case("aten.conv2d.default", (f(2, 4, 8, 8), f(6, 4, 3, 3)), minimum=7),
        Case("aten.conv2d.default", (f(4, 8, 8), f(6, 4, 3, 3), f(6))),
        Case("aten.conv2d.default", (f(2, 4, 5, 5), f(4, 1, 3, 3), f(4), [1, 1], [1, 1], [1, 1], 4), minimum=6),
        Case("aten.conv2d.default", (f(2, 8, 5, 5), f(4, 4, 3, 3), f(4), [1, 1], [1, 1], [1, 1], 2), minimum=7),
        Case("aten.conv2d.padding", (f(2, 4, 5, 5), f(6, 4, 3, 3), None, [1, 1], "same")),
        Case("aten.conv3d.default", (f(2, 4, 4, 4, 4), f(6, 4, 3, 3, 3))),
        Case("aten.conv3d.padding", (f(2, 4, 4, 4, 4), f(6, 4, 3, 3, 3))),
        Case("aten.conv_transpose1d.default", (f(2, 4, 5), f(4, 6, 3), f(6)), minimum=7),
        Case("aten.conv_transpose2d.input", (f(2, 4, 5, 5), f(4, 6, 3, 3))),
        Case("aten.conv_transpose2d.input", (f(2, 4, 5, 5), f(4, 2, 3, 3), None, [1, 1], [0, 0], [0, 0], 2), minimum=2),
        Case("aten.conv_transpose3d.input", (f(2, 4, 2, 2, 2), f(4, 6, 3, 3, 3))),
        *_attention(),
        Case("transformers.grouped_mm_fallback.default", (f(8, 4), f(4, 4, 6), ends), minimum=7),
        Case("transformers.grouped_mm_fallback.default", (f(6, 4), f(4, 4, 2), late), minimum=7),
    ]


def _recurrent() -> list[Case]:
    def weights(gates: int) -> list[Tensor]:
        return [f(gates * 4, 6), f(gates * 4, 4), f(gates * 4), f(gates * 4)]

    rest = (True, 1, 0.0, True, False)  # biases, one layer, no dropout, training, one direction
    both = [*weights(1), *weights(1)]
    return [
        Case("aten.lstm.input", (f(4, 3, 6), [f(1, 4, 4), f(1, 4, 4)], weights(4), *rest, True), minimum=3),
        Case("aten.gru.input", (f(3, 4, 6), f(1, 4, 4), weights(3), *rest, False), minimum=3),
        Case("aten.rnn_tanh.input", (f(4, 3, 6), f(2, 4, 4), both, True, 1, 0.0, True, True, True), minimum=3),
        Case("aten.rnn_relu.input", (f(4, 3, 6), f(1, 4, 4), weights(1), *rest, True), minimum=3),
        Case("aten.lstm_cell.default", (f(4, 6), [f(4, 4), f(4, 4)], *weights(4)), minimum=3),
        Case("aten.gru_cell.default", (f(4, 6), f(4, 4), *weights(3)), minimum=3),
        Case("aten.rnn_tanh_cell.default", (f(4, 6), f(4, 4), *weights(1)[:2]), minimum=3),
        Case("aten.rnn_relu_cell.default", (f(4, 6), f(4, 4), *weights(1)), minimum=3),
    ]


def _attention() -> list[Case]:
    name = "aten.scaled_dot_product_attention.default"
    q, k, v = f(2, 4, 6, 2), f(2, 4, 3, 2), f(2, 4, 3, 5)
    return [
        Case(name, (q, k, v), minimum=6),
        Case(name, (q, q, q, None, 0.0, True), minimum=6),
        Case(name, (q, k, v, m(2, 1, 6, 3) | True), {"scale": 0.25}, minimum=6),
        Case(name, (q, k, v, f(6, 3)), minimum=6),
        Case(name, (q, k, v, None, 0.5)),
        Case(name, (q, q, q, None, 0.5, True), minimum=5),
        Case(name, (q[0], k[0], v[0])),
        Case(name, (q, k[:, :2], v[:, :2], f(2, 4, 6, 3)), {"enable_gqa": True}, minimum=6),
    ]


def _shapes() -> list[Case]:
    return [
        Case("aten.reshape.default", (f(2, 4, 6), [8, 6]), minimum=6),
        Case("aten.reshape.default", (f(4, 12), [4, 2, 6]), minimum=6),
        Case("aten.reshape.default", (f(4, 12), [-1, 3, 1, 4]), minimum=5),
        Case("aten.reshape.default", (f(4, 6, 4), [4, 4, 6]), minimum=4),
        Case("aten.reshape.default", (f(1, 1), [])),
        Case("aten.view.default", (f(2, 4, 6), [2, 24]), minimum=6),
        Case("aten._unsafe_view.default", (f(2, 4, 6), [2, 24]), minimum=6),
        Case("aten.transpose.int", (f(2, 4, 6), 1, -1), minimum=6),
        Case("aten.t.default", (f(4, 6),)),
        Case("aten.permute.default", (f(2, 4, 6), [2, 0, -2]), minimum=6),
        Case("aten.unsqueeze.default", (f(4, 6), -1), minimum=5),
        Case("aten.squeeze.default", (f(4, 1, 6),), minimum=5),
        Case("aten.squeeze.dim", (f(4, 1, 6), 1), minimum=5),
        Case("aten.squeeze.dims", (f(4, 1, 6, 1), [1, 3]), minimum=5),
        Case("aten.expand.default", (f(4, 1, 6), [2, -1, 8, 6]), minimum=7),
        Case("aten.as_strided.default", (f(24), [4, 5, 2], [6, 1, 1])),
        Case("aten.expand_as.default", (f(4, 1), f(2, 4, 6))),
        Case("aten.split_with_sizes.default", (f(2, 12), [4, 4, 4], 1), minimum=5),
        Case("aten.split_with_sizes.default", (f(2, 12), [8, 2, 2], -1), minimum=4),
        Case("aten.glu.default", (f(4, 8, 3), 1), minimum=4),
        Case("aten.glu.default", (f(4, 12),), minimum=3),
        Case("aten.slice.Tensor", (f(4, 8), 1, 0, 9223372036854775807), minimum=5),
        Case("aten.slice.Tensor", (f(4, 8), 1, 0, 8), minimum=5),
        Case("aten.slice.Tensor", (f(4, 8), 1, 4, 9223372036854775807), minimum=5),
        Case("aten.slice.Tensor", (f(4, 8), 1, -4, -2), minimum=5),
        Case("aten.slice.Tensor", (f(4, 8), 1, 1, 3), minimum=4),
        Case("aten.slice.Tensor", (f(4, 8), 1, 0, 8, 2), minimum=4),
        Case("aten.select.int", (f(4, 8), 1, 2), minimum=4),
        Case("aten.unfold.default", (f(4, 7, 6), 1, 3, 2), minimum=5),
        Case("aten.im2col.default", (f(4, 2, 6, 5), [3, 2], [1, 1], [1, 0], [2, 1]), minimum=5),
        Case("aten.col2im.default", (f(4, 12, 4), [4, 5], [3, 2], [1, 1], [0, 0], [1, 2]), minimum=5),
        Case("aten.unbind.int", (f(3, 4, 8),), minimum=5),
        Case("aten.unbind.int", (f(4, 3, 8), -2), minimum=5),
        Case("aten.cat.default", ([f(4, 2), f(4, 2)], 1), minimum=5),
        Case("aten.cat.default", ([f(4, 2), f(4, 3)], -1), minimum=4),
        Case("aten.cat.default", ([f(0), f(4, 6), f(4, 6)], 0), minimum=5),
        Case("aten.cat.default", ([f(0), f(4, 6)], 1), minimum=5),
        Case("aten.stack.default", ([f(4, 6), f(4, 6)], 1), minimum=5),
        Case("aten.repeat.default", (f(4, 6), [2, 1, 4]), minimum=6),
        Case("aten.repeat_interleave.self_int", (f(4, 6), 2, 1), minimum=6),
        Case("aten.flip.default", (f(4, 6), [1]), minimum=4),
        Case("aten.roll.default", (f(4, 6), [1], [1]), minimum=4),
        Case("aten.tril.default", (f(2, 4, 4),), minimum=4),
        Case("aten.triu.default", (f(2, 4, 4), 1), minimum=4),
        Case("aten.diagonal.default", (f(4, 4, 6),), minimum=4),
        Case("aten.pad.default", (f(4, 6), [0, 1], "constant", -100.0), minimum=3),
        Case("aten.pad.default", (f(4, 6), [0, 1]), minimum=4),
        Case("aten.pad.default", (f(4, 6, 4), [1, 1], "reflect"), minimum=4),
        Case("aten.constant_pad_nd.default", (f(4, 6), [1, 1]), minimum=4),
        Case("aten.diff.default", (f(4, 6), 2, 0), minimum=4),
        Case("aten.diff.default", (f(4, 6), 1, -1, f(4, 1)), minimum=4),
        Case("aten.slice_scatter.default", (f(4, 6), f(4, 2), 1, 1, 3), minimum=4),
        Case("aten.select_scatter.default", (f(4, 6), f(4), 1, 2), minimum=4),
    ]


def _half_masked() -> Tensor:
    """Rows of which the first, the second or no half is -inf."""
    x = f(4, 6)
    x[0, :3] = x[1, 3:] = -torch.inf
    return x


def _reductions() -> list[Case]:
    along = "amax amin argmax argmin prod.dim_int any.dim all.dim max.dim min.dim median.dim nanmedian.dim"
    lists = "any.dims all.dims var.correction std.correction var_mean.correction std_mean.correction var.dim std.dim"
    full = "max min any all prod median count_nonzero var std mean argmax"
    single = {*along.split()} - {"amax", "amin"}

    def key(name: str) -> str:
        return f"aten.{name}" if "." in name else f"aten.{name}.default"

    return [
        Case("aten.sum.default", (f(4, 6),), minimum=5),
        Case("aten.sum.dim_IntList", (f(4, 6), [-1], True), minimum=5),
        Case("aten.sum.dim_IntList", (f(4, 6), [0, 1]), minimum=5),
        Case("aten.sum.dim_IntList", (i(3, 4, 6), [0]), minimum=3),
        Case("aten.sum.dim_IntList", (f(4, 6), None), minimum=5),
        Case("aten.mean.dim", (f(4, 6), [-1], True), minimum=5),
        Case("aten.mean.dim", (f(4, 6, 2), [0, 2]), minimum=6),
        Case("aten.logsumexp.default", (f(4, 6), [1], True), minimum=4),
        Case("aten.logsumexp.default", (f(4, 6, 2), [0, -1]), minimum=5),
        Case("aten.softmax.int", (_half_masked(), -1), minimum=4),
        Case("aten.log_softmax.int", (f(4, 6), 0), minimum=4),
        Case("aten.log_softmax.int", (f(4, 6, 2), 1), minimum=5),
        *[Case(key(name), (f(4, 6), 1 if name in single else [1]), minimum=3) for name in along.split()],
        *[Case(key(name), (f(4, 6), [1]), {"keepdim": True}, minimum=3) for name in lists.split()],
        *[Case(key(name), (f(4, 6),)) for name in full.split()],
        Case("aten.count_nonzero.default", (f(4, 6), 1)),
        *[Case(f"aten.{name}.default", (f(4, 6), [1]), minimum=3) for name in ("nanmean", "nansum")],
        *[Case("aten.kthvalue.default", (f(4, 6), 2, *dim), minimum=3) for dim in ((), (0,))],
        *[Case("aten.mode.default", (f(4, 6), *dim), minimum=3) for dim in ((), (0, True))],
        Case("aten.count_nonzero.dim_IntList", (f(4, 6), [1])),
        Case("aten.linalg_vector_norm.default", (f(4, 6), 2, [1]), minimum=3),
        Case("aten.norm.ScalarOpt_dim", (f(4, 6), 2, [1]), minimum=3),
        *[
            Case(key(name), (f(4, 6), -1), minimum=3)
            for name in ("cumprod", "cummax", "cummin", "logcumsumexp", "cumsum")
        ],
        Case("aten._softmax.default", (f(4, 6), -1, False), minimum=3),
        Case("aten._log_softmax.default", (f(4, 6), 0, False), minimum=3),
    ]


def _normalisations_and_losses() -> list[Case]:
    statistics = (f(4), f(4), f(4), f(4))
    elementwise = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy"
    position = {"binary_cross_entropy": (None,)}
    constant = {"soft_margin_loss": (1,)}
    classes = ("cross_entropy_loss", "nll_loss_nd")
    resized = """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
    return [
        Case("aten.layer_norm.default", (f(2, 4, 6), [6], f(6), f(6)), minimum=5),
        Case("aten.layer_norm.default", (f(2, 4, 6), [6], f(6)), minimum=5),
        Case("aten.layer_norm.default", (f(2, 4, 6) + 1e4, [4, 6]), minimum=5),
        Case("aten.rms_norm.default", (f(2, 4, 6), [6], f(6)), minimum=5),
        Case("aten.rms_norm.default", (f(2, 4, 6), [6], None, 1e-3), minimum=5),
        Case("aten.group_norm.default", (f(2, 4, 3), 2, f(4), f(4)), minimum=5),
        Case("aten.group_norm.default", (f(2, 4, 3, 2), 1, f(4), f(4), 1e-3), minimum=4),
        Case(
            "aten.batch_norm.default", (f(2, 4, 3, 3), *statistics, True, 0.1, 1e-5, False), minimum=3, constant=(3, 4)
        ),
        Case(
            "aten.batch_norm.default", (f(2, 4, 3, 3), *statistics, False, 0.1, 1e-5, False), minimum=4, constant=(3, 4)
        ),
        Case("aten.batch_norm.default", (f(2, 4, 3), None, None, None, None, True, 0.1, 1e-5, False), minimum=3),
        *[
            Case(f"aten.{name}.default", (f(2, 4, *[6] * int(name[-2])), [2] * int(name[-2])), minimum=4)
            for name in ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
        ],
        Case("aten.max_pool2d_with_indices.default", (f(2, 4, 6, 6), [2, 2]), minimum=4),
        Case("aten.adaptive_max_pool2d.default", (f(2, 4, 6, 6), [2, 2]), minimum=4),
        Case("aten.adaptive_avg_pool1d.default", (f(2, 4, 6), [2]), minimum=5),
        Case("aten.adaptive_avg_pool2d.default", (f(2, 4, 6, 6), [1, 1]), minimum=5),
        *[
            Case(f"aten.{name}.vec", (f(2, 4, *[3] * space), [6] * space, *aligned, None), minimum=5)
            for name in resized.split()
            for space in [int(name.partition("d")[0][-1])]
            for aligned in [() if "nearest" in name else (False,)]
        ],
        Case("aten.pixel_shuffle.default", (f(2, 4, 3, 3), 2), minimum=4),
        Case("aten.pixel_unshuffle.default", (f(2, 4, 4, 4), 2), minimum=4),
        Case("aten.grid_sampler.default", (f(2, 4, 3, 3), f(2, 4, 6, 2) * 2 - 1, 0, 0, False), minimum=6),
        Case("aten.grid_sampler.default", (f(2, 4, 3, 3, 3), f(2, 4, 6, 2, 3) * 2 - 1, 0, 1, True), minimum=7),
        *[
            Case(
                f"aten.{name}.default",
                (f(*scores), i(6, *target), weight, reduction),
                {},
                2 + (reduction != 1),
                (2,) * (weight is not None),
            )
            for name in classes
            for scores, target in (((4, 6), (4,)), ((4, 6, 2), (4, 2)))
            for weight, given in ((None, ()), (f(6), (2,)))
            for reduction in (0, 1, 2)
        ],
        Case(
            "autopart.ctc_losses.default",
            (-f(7, 4, 5), i(4, 4, 3) + 1, torch.ones(4, 3, dtype=torch.bool), i(1, 4) + 7, i(1, 4) + 3, 0, False),
            minimum=2,
        ),
        Case("aten.cross_entropy_loss.default", (f(6), torch.tensor(3))),
        Case("aten.cross_entropy_loss.default", (f(4, 6), f(4, 6), None, 2, -100, 0.1), minimum=3),
        *[
            Case("aten.cross_entropy_loss.default", (f(4, 6) * 90, torch.tensor(labels), None, *rest), minimum=3)
            for rest in ((0, -100, 0.1), (1, -100, 0.1), (2, -100, 0.1), (0, 2), (1, 2), (2, 2))
            for labels in ([5, -100, 0, 2], [2, 2, 3, 5])
            if (rest[1] == 2) == (labels[0] == 2)
        ],
        *[Case("aten.nll_loss.default", (f(4, 6), i(6, 4), None, reduction)) for reduction in (0, 1, 2)],
        *[
            Case(
                f"aten.{name}.default",
                (f(4, 6), f(4, 6), *position.get(name, ()), reduction),
                minimum=2,
                constant=constant.get(name, ()),
            )
            for name in elementwise.split()
            for reduction in (0, 1, 2)
        ],
        *[
            case
            for reduction in (0, 1, 2)
            for case in (
                Case("aten.hinge_embedding_loss.default", (f(4, 6), signs(4, 6), 1.0, reduction), {}, 2, (1,)),
                Case("aten.margin_ranking_loss.default", (f(4, 6), f(4, 6), signs(4, 6), 0.1, reduction), {}, 2, (2,)),
                Case("aten.poisson_nll_loss.default", (f(4, 6), f(4, 6), True, False, 1e-8, reduction), {}, 2, (1,)),
                Case("aten.cosine_embedding_loss.default", (f(4, 6), f(4, 6), signs(4), 0.1, reduction), {}, 1, (2,)),
                Case("aten.triplet_margin_loss.default", (f(4, 6), f(4, 6), f(4, 6), 1.0, 2, 1e-6, False, reduction)),
                Case("aten.multilabel_margin_loss.default", (f(4, 6), i(6, 4, 6), reduction), {}, 1, (1,)),
                Case("aten.multi_margin_loss.default", (f(4, 6), i(6, 4), 1, 1.0, None, reduction), {}, 1, (1,)),
                Case("aten.multi_margin_loss.default", (f(4, 6), i(6, 4), 2, 0.5, f(6), reduction), {}, 1, (1, 2)),
            )
        ],
        Case("aten.cosine_similarity.default", (f(4, 6, 8), f(4, 6, 8), 1), minimum=3),
        Case("aten.cosine_similarity.default", (f(4, 6, 8), f(6, 8), -1), minimum=3),
        Case("aten.cosine_similarity.default", (f(4, 6, 1), f(4, 1, 8), 0), minimum=3),
        Case("aten.pairwise_distance.default", (f(4, 6, 8), f(6, 8)), minimum=3),
        Case("aten.pairwise_distance.default", (f(4, 6), f(4, 6), 1.0, 1e-6, True), minimum=2),
        Case("aten.cdist.default", (f(4, 6, 3), f(4, 8, 3)), minimum=4),
        Case("aten.cdist.default", (f(4, 6, 3), f(4, 8, 3), 1.0), minimum=4),
        Case("aten.cdist.default", (f(30, 3), f(28, 3)), minimum=3),
        Case("aten.instance_norm.default", (f(4, 6, 8), f(6), f(6), None, None, True, 0.1, 1e-5, False), minimum=3),
        Case(
            "aten.instance_norm.default",
            (f(4, 6, 8), f(6), f(6), f(6), f(6), False, 0.1, 1e-5, False),
            minimum=4,
            constant=(3, 4),
        ),
        *[
            Case(
                "aten.binary_cross_entropy_with_logits.default",
                (f(4, 6), f(4, 6), None, f(6), reduction),
                constant=(2,),
            )
            for reduction in (0, 1, 2)
        ],
    ]


def _indexing() -> list[Case]:
    return [
        Case("aten.embedding.default", (f(10, 6), i(10, 2, 4)), minimum=7),
        Case("aten.embedding.default", (f(10, 6), i(10, 2, 4), -1, True), minimum=4),
        Case("aten.embedding.default", (f(6, 4), torch.arange(6), 4), minimum=7),
        Case("aten.index.Tensor", (f(4, 6), [i(4, 8)]), minimum=5),
        Case("aten.index.Tensor", (f(4, 6, 2), [None, i(6, 4, 1), i(2, 2)]), minimum=5),
        Case("aten.index.Tensor", (f(4, 6, 2), [i(4, 8), None, i(2, 8)]), minimum=5),
        Case("aten.index_put.default", (f(8, 6), [torch.randperm(8)[:4]], f(4, 6)), minimum=4),
        Case("aten.index_put.default", (f(8, 6), [i(8, 4)], f(4, 6), True), minimum=5),
        Case("aten.index_put.default", (f(8, 6), [i(8, 4)], f()), minimum=4),
        Case("aten.index_put.default", (f(8, 6), [i(8, 4)], f(6)), minimum=4),
        Case("aten.index_put.default", (f(8, 6, 4), [i(8, 4)], f(6, 4), True), minimum=4),
        Case("aten.index_select.default", (f(4, 6), 1, i(6, 8)), minimum=5),
        Case("aten.index_add.default", (f(4, 6), 1, i(6, 8), f(4, 8)), minimum=5),
        Case("aten.gather.default", (f(4, 6), 1, i(6, 4, 8)), minimum=5),
        Case("aten.gather.default", (f(4, 6), 1, i(6, 2, 8)), minimum=4),
        Case(
            "aten.scatter.src", (f(4, 6), 1, torch.stack([torch.randperm(6)[:2] for _ in range(4)]), f(4, 2)), minimum=4
        ),
        Case("aten.scatter.value", (f(4, 6), 1, i(6, 4, 2), 0.0), minimum=4),
        Case("aten.scatter_add.default", (f(4, 6), 1, i(6, 4, 2), f(4, 2)), minimum=5),
        Case("aten.topk.default", (f(4, 6), 2), minimum=3),
        Case("aten.sort.default", (f(4, 6),), minimum=3),
        Case("aten.sort.stable", (f(4, 6),), {"stable": True, "dim": 0}, minimum=3),
        Case("aten.argsort.default", (f(4, 6), 0), minimum=3),
        Case("aten.one_hot.default", (i(6, 4, 2), 6), minimum=3),
        Case("aten.histc.default", (f(6), 4, 0, 1)),
    ]


@functools.cache
def cases() -> tuple[Case, ...]:
    """All examples, the same in every process; torch's own random numbers go on as if none had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return (
            *_unary(),
            *_binary(),
            *_constants(),
            *_contractions(),
            *_recurrent(),
            *_shapes(),
            *_reductions(),
            *spectral(),
            *_normalisations_and_losses(),
            *_indexing(),
            *matrices(),
            *special(),
            *drawn(),
            *constants(),
            *placed(),
            *pooled(),
            *products(),
        )

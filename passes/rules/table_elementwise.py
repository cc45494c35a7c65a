"""Rules of the ops that work on every element by itself, of casts and copies, and of constant tensors."""

from __future__ import annotations

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, names, operands, rank_of, words
from autopart.passes.rules.book import Entry, shape_of
from autopart.passes.rules.notation import Annotation
from autopart.passes.sizes import ONE

# Smooth or not, none of these is linear: a function of a sum is not the sum of the function.
_UNARY = words("""
abs acos acosh asin asinh atan atanh ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 floor frac
gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not
bitwise_not mish nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinh softplus softshrink
sqrt square tan tanh trunc clamp clamp_min clamp_max threshold
angle hardshrink special_entr special_i0 special_log_ndtr special_ndtr i0 special_i0e special_i1 special_i1e
special_erfcx special_ndtri special_bessel_j0 special_bessel_j1 special_spherical_bessel_j0 polygamma mvlgamma
logit sinc signbit isposinf isneginf isreal float_power.Tensor_Scalar isin.Tensor_Scalar
""")
_LINEAR_UNARY = words(
    "neg clone contiguous alias detach lift_fresh_copy positive rad2deg deg2rad conj_physical resolve_conj"
)
_BINARY = words("""
atan2.default maximum.default minimum.default max.other min.other fmod.Tensor fmod.Scalar remainder.Tensor
remainder.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar floor_divide.default floor_divide.Scalar
eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
logical_and.default logical_or.default logical_xor.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor
bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor
hypot.default xlogy.Tensor clamp.Tensor isclose.default logaddexp.default
copysign.Tensor logaddexp2.default special_xlog1py.default gcd.default lcm.default nextafter.default heaviside.default
igamma.default igammac.default special_gammainc.default special_gammaincc.default special_zeta.default fmax.default
fmin.default float_power.Tensor_Tensor float_power.Scalar bitwise_left_shift.Scalar_Tensor __lshift__.Scalar
__rshift__.Scalar __lshift__.Tensor __rshift__.Tensor
""")
_LIKE = words("zeros_like ones_like full_like")
# What empty_like holds is undefined, which comes to the same.
_RANDOM_LIKE = words("""
rand_like randn_like randint_like randint_like.low_dtype bernoulli bernoulli.p exponential log_normal cauchy geometric
uniform poisson normal.Tensor_float normal.float_Tensor normal_functional empty_like
""")
_RANDOM_BINARY = words("bernoulli.Tensor normal.Tensor_Tensor")


def elementwise(node: fx.Node) -> str:
    """``*d, *d -> *d`` for as many operands as the op has."""
    return ", ".join(["*d"] * operands(node)) + " -> *d"


def _linear_unary(node: fx.Node) -> Annotation:
    return Annotation("*d -> *d", linear=((0,),))


def _cast(node: fx.Node) -> Annotation:
    """Between floating-point types a cast is linear (to rounding); to and from others it is not."""
    (source,) = graph.inputs(node)
    target = graph.outputs(node)[0].fake
    both = source.fake.is_floating_point() and target.is_floating_point()
    return Annotation("*d -> *d", linear=((0,),) if both else ())


def _sum_of_two(node: fx.Node) -> Annotation:
    """``add`` and ``sub``: jointly linear in both tensors; a constant other than zero breaks linearity."""
    count = operands(node)
    constants = [item for item in node.args[:2] if isinstance(item, int | float)]
    linear = (tuple(range(count)),) if count == 2 or constants == [0] else ()
    return Annotation(elementwise(node), linear=linear)


def _multiply(node: fx.Node) -> Annotation:
    return Annotation(elementwise(node), linear=tuple((index,) for index in range(operands(node))))


def _divide(node: fx.Node) -> Annotation:
    """Linear in the dividend, unless rounded."""
    dividend = isinstance(node.args[0], fx.Node) and node.kwargs.get("rounding_mode") is None
    return Annotation(elementwise(node), linear=((0,),) if dividend else ())


def _where(node: fx.Node) -> Annotation:
    """Jointly linear in both branches; a scalar branch must be zero for that."""
    branches = node.args[1:3]
    scalars = [item for item in branches if not isinstance(item, fx.Node)]
    tensors = tuple(range(1, operands(node)))
    linear = (tensors,) if tensors and all(item == 0 for item in scalars) else ()
    return Annotation(elementwise(node), linear=linear)


def _masked_fill(node: fx.Node) -> Annotation:
    value = argument(node, 2, "value")
    if isinstance(value, fx.Node):
        return Annotation("*d, *d, -> *d", linear=((0, 2),))
    return Annotation("*d, *d -> *d", linear=((0,),) if value == 0 else ())


def _addc(node: fx.Node) -> Annotation:
    """addcmul ``x + v a b``: linear in (x, a) and (x, b); addcdiv ``x + v a / b``: in (x, a)."""
    both = "addcmul" in str(node.target)
    return Annotation("*d, *d, *d -> *d", linear=((0, 1), (0, 2)) if both else ((0, 1),))


def _lerp(node: fx.Node) -> Annotation:
    return Annotation(elementwise(node), linear=((0, 1),))


def _copy(node: fx.Node) -> Annotation:
    """``copy(self, src)`` is ``src`` in the shape and type of ``self``."""
    return Annotation("*d, *d -> *d", linear=((0, 1),))


def _dropout(node: fx.Node) -> Annotation:
    """A partial sum passes only if nothing is dropped: the ranks would have to drop the same elements."""
    drops = bool(argument(node, 1, "p", 0.5)) and argument(node, 2, "train", True) is not False
    outputs = ", ".join(["*d"] * len(graph.outputs(node)))
    return Annotation(f"*d -> {outputs}", linear=() if drops or "," in outputs else ((0,),), random=drops)


def _channels_dropped(node: fx.Node) -> Annotation:
    """Each channel of each sample is dropped or kept as a whole."""
    drops = bool(argument(node, 1, "p")) and bool(argument(node, 2, "train"))
    return Annotation("b c ^*s -> b c ^*s", linear=() if drops else ((0,),), random=drops)


def _prelu(node: fx.Node) -> str:
    """One slope for all elements, or one for each channel."""
    slopes = shape_of(graph.inputs(node)[1].fake)
    return "*d, 1 -> *d" if slopes == (ONE,) else "*d, -> *d" if not slopes else "b c *s, c -> b c *s"


def _weight_norm(node: fx.Node) -> Annotation:
    """Directions over their norm, which is over all dims but one, times sizes: linear in these.

    For torch -1 is no last dim here: the norm is then over all, and there may be one size for all too.
    """
    dim, size = argument(node, 2, "dim", 0), graph.inputs(node)[1].fake
    terms = [name if index == dim else f"^{name}" for index, name in enumerate(names(rank_of(node)))]
    sizes = ["1" if extent == ONE else term for extent, term in zip(shape_of(size), terms, strict=bool(size.dim()))]
    return Annotation(f"{' '.join(terms)}, {' '.join(sizes)} -> {' '.join(terms)}", linear=((1,),))


def _constant(node: fx.Node) -> Annotation:
    """A tensor filled with one value: every dim may be sharded; a tensor operand lends only its type."""
    output = " ".join(names(graph.outputs(node)[0].fake.dim()))
    inputs = ", ".join(" ".join(["_"] * value.fake.dim()) for value in graph.inputs(node))
    return Annotation(f"{inputs} -> {output}", random="empty" in str(node.target))


def _searched(node: fx.Node) -> str:
    """Each row of numbers in the sequence of its own, or all in one. A sorter is like the sequences."""
    sequence, numbers, *sorter = graph.inputs(node)
    rows = " ".join(names(numbers.fake.dim() - 1)) if sequence.fake.dim() > 1 else ""
    sequences = ", ".join([f"{rows} _"] * (1 + len(sorter)))
    return f"{sequences}, {rows} n -> {rows} n" if rows else f"{sequences}, *d -> *d"


def _overload(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        **{_overload(name): "*d -> *d" for name in _UNARY},
        **{_overload(name): _linear_unary for name in _LINEAR_UNARY},
        **{_overload(name): elementwise for name in _BINARY},
        "aten.bucketize.Tensor": "*d, _ -> *d",
        "aten.searchsorted.Tensor": _searched,
        "aten.to.dtype": _cast,
        "aten._to_copy.default": _cast,
        "aten.add.Tensor": _sum_of_two,
        "aten.sub.Tensor": _sum_of_two,
        "aten.rsub.Tensor": _sum_of_two,
        "aten.rsub.Scalar": _sum_of_two,
        "aten.mul.Tensor": _multiply,
        "aten.div.Tensor": _divide,
        "aten.div.Tensor_mode": _divide,
        "aten.where.self": _where,
        "aten.where.ScalarOther": _where,
        "aten.where.ScalarSelf": _where,
        "aten.where.Scalar": elementwise,
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.masked_fill.Tensor": _masked_fill,
        "aten.addcmul.default": _addc,
        "aten.addcdiv.default": _addc,
        "aten.lerp.Scalar": _lerp,
        "aten.lerp.Tensor": _lerp,
        "aten.copy.default": _copy,
        "aten.fill.Scalar": "*d -> *d",
        "aten.dropout.default": _dropout,
        "aten.native_dropout.default": _dropout,
        "aten.alpha_dropout.default": _dropout,
        "aten.feature_dropout.default": _channels_dropped,
        "aten.feature_alpha_dropout.default": _channels_dropped,
        **{_overload(name): "*d -> *d" for name in _LIKE},
        **{_overload(name): Annotation("*d -> *d", random=True) for name in _RANDOM_LIKE},
        **{_overload(name): Annotation("*d, *d -> *d", random=True) for name in _RANDOM_BINARY},
        "aten.multinomial.default": Annotation("*d _ -> *d _", random=True),
        "aten.isin.Tensor_Tensor": "*d, ^*t -> *d",
        "aten.frexp.Tensor": "*d -> *d, *d",
        "aten.ldexp.Tensor": Annotation("*d, *d -> *d", linear=((0,),)),
        "aten.prelu.default": _prelu,
        "aten._weight_norm.default": _weight_norm,
        **{f"aten.{name}.default": _constant for name in ("full", "new_full", "new_ones", "new_zeros", "new_empty")},
        **{
            f"aten.{name}": _constant
            for name in ("zeros.default", "ones.default", "empty.memory_format", "scalar_tensor.default")
        },
        # Positions: what an element holds depends on where it stands.
        "aten.eye.default": "-> _ _",
        "aten.eye.m": "-> _ _",
        "aten.tril_indices.default": "-> _ _",
        "aten.triu_indices.default": "-> _ _",
        "aten.linspace.default": "-> _",
        "aten.fft_fftfreq.default": "-> _",
        "aten.fft_rfftfreq.default": "-> _",
        **{_overload(f"{name}_window"): "-> _" for name in words("hann hamming blackman bartlett kaiser")},
        "aten.arange.default": "-> _",
        "aten.arange.start": "-> _",
        "aten.arange.start_step": "-> _",
    }

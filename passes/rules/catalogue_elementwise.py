"""Example calls of special functions, random draws and constants (:mod:`autopart.passes.rules.catalogue`)."""

from __future__ import annotations

import torch

from autopart.passes.rules.examples import F64, Case, f, i


def key(name: str) -> str:
    """An op by its name, of the overload that has none if none is given."""
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def special() -> list[Case]:
    """Functions of every element, and what goes along with them."""
    unary = """i0 special_i0e special_i1 special_i1e special_erfcx special_ndtri logit sinc signbit isposinf isneginf
    isreal positive rad2deg deg2rad"""
    no_gradient = "special_bessel_j0 special_bessel_j1 special_spherical_bessel_j0"
    constant = "heaviside nextafter igammac igamma special_gammainc special_gammaincc"
    z = torch.complex(f(4, 6), f(4, 6))
    return [
        *[Case(key(name), (f(4, 6),), minimum=3) for name in unary.split()],
        *[Case(key(name), (f(4, 6),), {}, 3, (0,)) for name in no_gradient.split()],
        *[Case(key(name), (z,), minimum=4) for name in ("conj_physical", "resolve_conj")],
        Case(key("polygamma"), (1, f(4, 6)), minimum=3),
        Case(key("mvlgamma"), (f(4, 6) + 3, 2), minimum=3),
        Case(key("float_power.Tensor_Scalar"), (f(4, 6), 2), minimum=3),
        Case(key("float_power.Scalar"), (2, f(4, 6)), minimum=3),
        Case(key("float_power.Tensor_Tensor"), (f(4, 6), f(6)), minimum=3),
        *[Case(key(name), (f(4, 6), f(6)), minimum=3) for name in ("fmax", "fmin")],
        *[Case(key(name), (f(4, 6), f(6)), {}, 3, (0, 1)) for name in constant.split()],
        Case(key("special_zeta"), (f(4, 6) + 2, f(6) + 1), {}, 3, (0, 1)),
        *[Case(key(name), (i(8, 4, 6) + 1, i(8, 6) + 1), minimum=3) for name in ("gcd", "lcm")],
        *[Case(key(f"__{side}shift__.Tensor"), (i(8, 4, 6), i(3, 6)), minimum=3) for side in "lr"],
        *[Case(key(f"__{side}shift__.Scalar"), (i(8, 4, 6), 2), minimum=3) for side in "lr"],
        Case(key("bitwise_left_shift.Scalar_Tensor"), (1, i(8, 4, 6)), minimum=3),
        Case(key("isin.Tensor_Tensor"), (i(8, 4, 6), i(8, 3)), minimum=3),
        Case(key("isin.Tensor_Scalar"), (i(8, 4, 6), 3), minimum=3),
        Case(key("frexp.Tensor"), (f(4, 6),), {}, 3, (0,)),
        Case(key("ldexp.Tensor"), (f(4, 6), i(3, 6)), minimum=4),
        Case(key("prelu"), (f(4, 6, 2) - 0.5, f(6)), minimum=5),
        Case(key("prelu"), (f(4, 6) - 0.5, f(1)), minimum=4),
        *[Case(key("_weight_norm"), (f(4, 6, 2), f(*shape), dim), minimum=4) for shape, dim in _SIZES],
        *[Case(key("_weight_norm"), (f(4, 6, 2), f(*shape), -1), minimum=3) for shape in _OF_ALL],
    ]


_SIZES = (((4, 1, 1), 0), ((1, 1, 2), 2))
_OF_ALL = ((), (1, 1, 2))  # what weight norm is given where the norm is over all dims


def drawn() -> list[Case]:
    """Random numbers."""
    p = torch.full((4, 6), 0.5, dtype=F64)
    like = "exponential log_normal cauchy geometric uniform poisson normal.Tensor_float normal_functional"
    given = {"geometric": (0.5,)}
    dropouts = [
        ("alpha_dropout", (4, 6), 5),
        ("feature_dropout", (4, 6, 2), 4),
        ("feature_alpha_dropout", (4, 6, 2), 4),
    ]
    return [
        *[Case(key(name), (f(4, 6), *given.get(name, ())), {}, 3, (0,)) for name in like.split()],
        Case(key("normal.float_Tensor"), (0.0, f(4, 6)), {}, 3, (0,)),
        Case(key("normal.Tensor_Tensor"), (f(4, 6), f(6)), {}, 3, (0, 1)),
        Case(key("bernoulli.p"), (f(4, 6), 0.5), {}, 3, (0,)),
        Case(key("bernoulli.Tensor"), (f(4, 6), p), {}, 3, (0, 1)),
        Case(key("randint_like"), (f(4, 6), 5), {}, 3, (0,)),
        Case(key("randint_like.low_dtype"), (f(4, 6), 2, 5), {}, 3, (0,)),
        Case(key("multinomial"), (f(4, 6), 2), {}, 2, (0,)),
        *[Case(key(name), (f(*shape), 0.5, True), minimum=3) for name, shape, _ in dropouts],
        *[Case(key(name), (f(*shape), 0.5, False), minimum=least) for name, shape, least in dropouts],
    ]


def constants() -> list[Case]:
    """Tensors that are the same in every call."""
    windows = "hann hamming blackman bartlett kaiser"
    return [
        Case(key("eye"), (4,)),
        Case(key("eye.m"), (4, 6)),
        *[Case(key(name), (4, 6)) for name in ("tril_indices", "triu_indices")],
        Case(key("linspace"), (0, 1, 6)),
        *[Case(key(name), (6,)) for name in ("fft_fftfreq", "fft_rfftfreq")],
        *[Case(key(f"{name}_window"), (6,)) for name in windows.split()],
    ]

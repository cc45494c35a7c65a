"""Example calls of the ops of linear algebra, and of Fourier transforms (:mod:`autopart.passes.rules.catalogue`)."""

from __future__ import annotations

import torch
from torch import Tensor

from autopart.passes.rules.examples import F64, Case, f


def key(name: str) -> str:
    """An op by its name, of the overload that has none if none is given."""
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _definite() -> Tensor:
    """Symmetric matrices whose eigenvalues differ."""
    half = f(4, 3, 3)
    return half @ half.transpose(1, 2) + torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=F64))


def matrices() -> list[Case]:
    """Of linear algebra."""
    a, tall = _definite(), f(4, 5, 3)
    upper, lower = a.triu(), torch.linalg.cholesky(a)
    square = """linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky linalg_eigh linalg_eigvalsh
    linalg_eigvals linalg_det det linalg_slogdet slogdet logdet linalg_matrix_exp matrix_exp linalg_lu linalg_lu_factor
    linalg_lu_factor_ex linalg_cond linalg_svdvals linalg_qr qr svd linalg_ldl_factor geqrf"""
    no_gradient = {"geqrf", "linalg_ldl_factor"}
    any_shape = "linalg_qr linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor pinverse linalg_svdvals"
    factors, pivots = torch.linalg.lu_factor(a)
    coefficients = f(4, 3)
    return [
        *[Case(key(name), (a,), {}, 2, (0,) * (name in no_gradient)) for name in square.split()],
        *[Case(key(name), (tall,), minimum=3) for name in any_shape.split()],
        Case(key("linalg_qr"), (tall, "r"), {}, 2, (0,)),
        Case(key("linalg_svd"), (tall, False), minimum=3),
        Case(key("linalg_eig"), (a,), {}, 2, (0,)),
        Case(key("linalg_pinv"), (tall, 1e-15), minimum=3),
        Case(key("linalg_pinv.atol_rtol_tensor"), (tall,), {"rtol": f(4) * 1e-9}, 3, (1,)),
        *[Case(key(f"linalg_matrix_rank.atol_rtol_{name}"), (tall,), minimum=2) for name in ("tensor", "float")],
        Case(key("linalg_matrix_rank"), (tall, 1e-9), minimum=2),
        *[Case(key(name), (a, 3), minimum=3) for name in ("linalg_matrix_power", "matrix_power")],
        Case(key("linalg_cond.p_str"), (a, "fro"), {}, 2, (0,)),
        Case(key("cholesky_inverse"), (lower,), minimum=3),
        Case(key("linalg_householder_product"), (tall, coefficients), minimum=3),
        *[Case(key("linalg_solve"), (a, right), minimum=3) for right in (f(4, 3, 2), f(4, 3), f(3, 2))],
        Case(key("linalg_solve"), (a, f(4, 2, 3)), {"left": False}, minimum=4),
        Case(key("linalg_solve"), (a[0], f(3)), minimum=2),
        Case(key("linalg_solve_triangular"), (upper, f(4, 3, 2)), {"upper": True}, minimum=4),
        Case(key("linalg_solve_triangular"), (upper, f(4, 2, 3)), {"upper": True, "left": False}, minimum=4),
        Case(key("triangular_solve"), (f(4, 3, 2), upper), minimum=3),
        Case(key("cholesky_solve"), (f(4, 3, 2), lower), minimum=4),
        Case(key("linalg_lu_solve"), (factors, pivots, f(4, 3, 2)), minimum=4),
        Case(key("linalg_matrix_norm"), (tall, 2), minimum=3),
        Case(key("linalg_matrix_norm"), (f(4, 3, 6), 1, [0, 1], True), minimum=3),
        *[Case(key("linalg_matrix_norm.str_ord"), (tall, name), minimum=3) for name in ("fro", "nuc")],
        Case(key("linalg_norm"), (tall, None, [-1]), minimum=4),
        Case(key("linalg_norm"), (tall, 2, [0, 2], True), minimum=2),
        Case(key("linalg_norm"), (tall,), minimum=2),
        Case(key("linalg_cross"), (f(4, 3, 2), f(1, 3, 2)), {"dim": 1}, minimum=5),
        Case(key("cross"), (f(4, 2, 3), f(4, 2, 3), -1), minimum=5),
        Case(key("linalg_vecdot"), (f(4, 6, 2), f(4, 6, 2)), {"dim": 1}, minimum=7),
        Case(key("linalg_vander"), (f(4, 2),), {"N": 3}, minimum=4),
    ]


def spectral() -> list[Case]:
    """Of Fourier transforms and complex numbers."""
    z = torch.complex(f(4, 6, 8), f(4, 6, 8))
    return [
        *[Case(key(name), (z, 6, 1), minimum=3) for name in ("fft_fft", "fft_ifft", "fft_irfft", "fft_hfft")],
        *[Case(key(name), (f(4, 6, 8),), minimum=3) for name in ("fft_fft", "fft_rfft", "fft_ihfft", "fft_rfft2")],
        *[Case(key(name), (z, None, [0, 2]), minimum=3) for name in ("fft_fft2", "fft_ifft2", "fft_irfft2")],
        *[Case(key(name), (z, [6, 8]), minimum=3) for name in ("fft_fftn", "fft_ifftn", "fft_irfftn")],
        Case(key("fft_rfftn"), (f(4, 6, 8),)),
        *[Case(key(name), (z, None, [0, 2]), minimum=3) for name in ("fft_hfft2", "fft_hfftn")],
        *[Case(key(name), (f(4, 6, 8), None, [0, 2]), minimum=3) for name in ("fft_ihfft2", "fft_ihfftn")],
        Case(key("stft"), (f(4, 32), 8), {"return_complex": True}, 4),
        Case(key("stft"), (f(4, 32), 8, 2, 8, f(8)), {"return_complex": False}, 5),
        Case(key("stft.center"), (f(4, 32), 8, 2, 8, f(8)), {"return_complex": True}, 5),
        Case(key("stft"), (f(32), 8), {"return_complex": True}, 3),
        Case(key("istft"), (torch.complex(f(4, 5, 6), f(4, 5, 6)), 8, 2, 8, f(8)), {}, 4),
        Case(key("istft"), (torch.complex(f(5, 6), f(5, 6)), 8), {}, 3),
        *[Case(key(name), (z, [1]), minimum=3) for name in ("fft_fftshift", "fft_ifftshift")],
        *[Case(key(name), (z,), minimum=4) for name in ("real", "imag", "view_as_real")],
        Case(key("view_as_complex"), (f(4, 6, 2),), minimum=3),
        *[Case(key(name), (f(4, 6), f(4, 6)), minimum=3) for name in ("complex", "polar")],
    ]

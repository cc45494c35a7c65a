"""Rules of Fourier transforms and of the parts of complex numbers: linear, with the transformed dims whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, dims_of, names, operands, positive, rank_of, words
from autopart.passes.rules.book import Entry
from autopart.passes.rules.notation import Annotation


def _transformed(node: fx.Node, dims: Sequence[int]) -> Annotation:
    """A transform may change the sizes of its dims, so that each is a frozen dim of its own on both sides."""
    line = " ".join("_" if dim in dims else name for dim, name in enumerate(names(rank_of(node))))
    return Annotation(f"{line} -> {line}", linear=((0,),))


def _one_dim(node: fx.Node) -> Annotation:
    return _transformed(node, [positive(argument(node, 2, "dim", -1), rank_of(node))])


def _two_dims(node: fx.Node) -> Annotation:
    return _transformed(node, [positive(dim, rank_of(node)) for dim in argument(node, 2, "dim", (-2, -1))])


def _many_dims(node: fx.Node) -> Annotation:
    """Without dims the last ones are transformed, as many as there are sizes; without sizes all."""
    rank, sizes = rank_of(node), argument(node, 1, "s")
    if argument(node, 2, "dim") is None and sizes is not None:
        return _transformed(node, range(rank - len(sizes), rank))
    return _transformed(node, dims_of(node, 2, "dim"))


def _shifted(node: fx.Node) -> Annotation:
    return _transformed(node, dims_of(node, 1, "dim"))


def _pairs(node: fx.Node) -> Annotation:
    """A last dim of two, the real and the imaginary part, appears or goes."""
    if "view_as_real" in str(node.target):
        return Annotation("*b -> *b _", linear=((0,),))
    return Annotation("*b _ -> *b", linear=((0,),))


def _short_time(node: fx.Node) -> Annotation:
    """``stft``: each signal by itself becomes frequencies and times, of real numbers in pairs. A window scales it."""
    after = graph.outputs(node)[0].fake.dim()
    window = operands(node) == 2
    rows = "b " * (rank_of(node) == 2)
    text = f"{rows}_{', _' * window} -> {rows}{' '.join('_' * (after - len(rows) // 2))}"
    return Annotation(text, linear=((0,), (1,)) if window else ((0,),))


def _back_from_short_time(node: fx.Node) -> Annotation:
    """``istft``, which divides by what the window makes of overlaps."""
    rows = "b " * (rank_of(node) == 3)
    return Annotation(f"{rows}_ _{', _' * (operands(node) == 2)} -> {rows}_", linear=((0,),))


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""

    def key(name: str) -> str:
        return f"aten.{name}.default"

    parts = Annotation("*b -> *b", linear=((0,),))
    return {
        **{key(name): _one_dim for name in words("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft")},
        **{key(name): _two_dims for name in words("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2")},
        **{key(name): _many_dims for name in words("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn")},
        **{key(name): _shifted for name in words("fft_fftshift fft_ifftshift")},
        **{key(name): parts for name in words("real imag")},
        **{key(name): _pairs for name in words("view_as_real view_as_complex")},
        "aten.stft.default": _short_time,
        "aten.stft.center": _short_time,
        "aten.istft.default": _back_from_short_time,
        "aten.complex.default": Annotation("*b, *b -> *b", linear=((0, 1),)),
        "aten.polar.default": "*b, *b -> *b",
    }

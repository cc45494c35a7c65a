"""Rules of Fourier transforms and of the parts of complex numbers: linear, with the transformed dims whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.passes.rules.arguments import argument, dims_of, names, positive, rank_of, words
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


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""

    def key(name: str) -> str:
        return f"aten.{name}.default"

    parts = Annotation("*b -> *b", linear=((0,),))
    return {
        **{key(name): _one_dim for name in words("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft")},
        **{key(name): _two_dims for name in words("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2")},
        **{key(name): _many_dims for name in words("fft_fftn fft_ifftn fft_rfftn fft_irfftn")},
        **{key(name): _shifted for name in words("fft_fftshift fft_ifftshift")},
        **{key(name): parts for name in words("real imag")},
        **{key(name): _pairs for name in words("view_as_real view_as_complex")},
        "aten.complex.default": Annotation("*b, *b -> *b", linear=((0, 1),)),
        "aten.polar.default": "*b, *b -> *b",
    }

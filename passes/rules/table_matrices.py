"""Rules of linear algebra on the matrices of the last two dims: each matrix is whole, the dims before them are free."""

from __future__ import annotations

from functools import partial

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, names, positive, rank_of, words
from autopart.passes.rules.book import Entry, shape_of
from autopart.passes.rules.notation import Annotation
from autopart.passes.sizes import Extent


def _results(node: fx.Node, batch: int) -> str:
    """One term per output: the dims before the matrices, and whatever each gives. What is left out has size 0."""
    shapes = [shape_of(value.fake) for value in graph.outputs(node)]
    return ", ".join(
        " ".join("_" * len(shape) if Extent(0) in shape else ["*b", *"_" * (len(shape) - batch)]) for shape in shapes
    )


def _matrices(node: fx.Node, tail: int = 2) -> str:
    """Ops of one matrix each; further operands (tolerances, coefficients) have one value, or a vector, for each."""
    batch = rank_of(node) - 2
    given = [value.fake.dim() for value in graph.inputs(node)]
    terms = [" ".join(["*b", *"_" * max(rank - batch, 0)]) for rank in given]
    return f"{', '.join(terms)} -> {_results(node, batch)}"


def _solved(node: fx.Node, matrix: int, right: int) -> Annotation:
    """``A X = B`` or ``X A = B``: each column, or row, of B by itself. The result is linear in B."""
    ranks = [value.fake.dim() for value in graph.inputs(node)]
    alone = len(graph.outputs(node)) == 1  # else a copy of A comes along
    free = "k" if alone else "_"
    side = f"_ {free}" if node.kwargs.get("left", True) else f"{free} _"
    if "linalg_solve.default" in str(node.target) and _is_vector(node):
        side = "_"
    terms = ["*b _" if rank < ranks[matrix] else "*b _ _" for rank in ranks]
    terms[right] = f"*b {side}"
    copy = "" if alone else ", *b _ _"
    return Annotation(f"{', '.join(terms)} -> *b {side}{copy}", linear=((right,),) * alone)


def _is_vector(node: fx.Node) -> bool:
    """``linalg.solve`` takes B for vectors where it has the shape of A without its last dim, or has one dim."""
    a, b = (shape_of(value.fake) for value in graph.inputs(node))
    return len(b) == 1 or b == a[:-1]


def _norm(node: fx.Node) -> str:
    """Of matrices in two dims (``linalg.norm``: of vectors in one, or of all), which are frozen."""
    rank, whole = rank_of(node), str(node.target).startswith("aten.linalg_norm")
    dims = argument(node, 2, "dim", None if whole else (-2, -1))
    gone = {positive(dim, rank) for dim in ([dims] if isinstance(dims, int) else dims or range(rank))}
    before = [f"^{name}" if dim in gone else name for dim, name in enumerate(names(rank))]
    keep = rank > 0 and graph.outputs(node)[0].fake.dim() == rank
    after = ["1" if dim in gone else name for dim, name in enumerate(before) if keep or dim not in gone]
    return f"{' '.join(before)} -> {' '.join(after)}"


def _cross(node: fx.Node) -> Annotation | None:
    """The vector product along a dim of three: linear in each."""
    rank = max(rank_of(node), rank_of(node, 1))
    dim = argument(node, 2, "dim", -1 if "linalg" in str(node.target) else None)
    if dim is None:
        return None
    terms = names(rank)
    terms[positive(dim, rank)] = f"^{terms[positive(dim, rank)]}"
    given = [" ".join(terms[rank - rank_of(node, operand) :]) for operand in (0, 1)]
    return Annotation(f"{', '.join(given)} -> {' '.join(terms)}", linear=((0,), (1,)))


def _inner_products(node: fx.Node) -> Annotation | None:
    """``linalg.vecdot``: sums of products along a dim."""
    rank = max(rank_of(node), rank_of(node, 1))
    if rank_of(node) != rank_of(node, 1) or graph.inputs(node)[0].fake.is_complex():
        return None
    terms = names(rank)
    dim = positive(argument(node, 2, "dim", -1), rank)
    line = " ".join(terms)
    text = f"{line}, {line} -> {' '.join(terms[:dim] + terms[dim + 1 :])}"
    return Annotation(text, linear=((0,), (1,)), products=(line,))


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    single = words(
        "linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse linalg_qr qr "
        "linalg_svd svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals linalg_det det slogdet "
        "linalg_slogdet logdet linalg_matrix_exp matrix_exp linalg_pinv linalg_pinv.atol_rtol_tensor "
        "linalg_pinv.atol_rtol_float pinverse linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matrix_power "
        "matrix_power linalg_matrix_rank linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float "
        "linalg_cond linalg_cond.p_str linalg_householder_product linalg_ldl_factor geqrf"
    )

    def key(name: str) -> str:
        return f"aten.{name}" if "." in name else f"aten.{name}.default"

    return {
        **{key(name): _matrices for name in single},
        "aten.linalg_solve.default": partial(_solved, matrix=0, right=1),
        "aten.linalg_solve_triangular.default": partial(_solved, matrix=0, right=1),
        "aten.triangular_solve.default": partial(_solved, matrix=1, right=0),
        "aten.cholesky_solve.default": partial(_solved, matrix=1, right=0),
        "aten.linalg_lu_solve.default": partial(_solved, matrix=0, right=2),
        **{f"aten.linalg_{name}": _norm for name in words("matrix_norm.default matrix_norm.str_ord norm.default")},
        "aten.linalg_cross.default": _cross,
        "aten.cross.default": _cross,
        "aten.linalg_vecdot.default": _inner_products,
        "aten.linalg_vander.default": "*b -> *b _",
    }

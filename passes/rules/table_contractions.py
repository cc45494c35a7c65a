"""Rules of the ops that multiply arrays: matrix products, convolutions, attention, grouped products.

All are linear in each factor of the product, and jointly so with an added bias. ``products`` says what FLOPs count.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopart.passes import graph
from autopart.passes.rules.arguments import argument, names, operands, rank_of
from autopart.passes.rules.book import Entry, shape_of
from autopart.passes.rules.notation import Annotation, LocalForm, Panels
from autopart.passes.sizes import Extent


def _product(text: str, factors: str, bias: int | None = None) -> Annotation:
    """A product of two operands; ``bias`` is the index of an operand added to it (0 or 2), if there is one."""
    if bias is None:
        return Annotation(text, linear=((0,), (1,)), products=(factors,))
    first, second = (operand for operand in range(3) if operand != bias)
    return Annotation(text, linear=((first, bias), (second, bias)), affine=(bias,), products=(factors,))


def _addmm(node: fx.Node) -> Annotation:
    """The added operand broadcasts to ``m n``."""
    added = ("", "n", "m n")[rank_of(node, 0)]
    found = _product(f"{added}, m k, k n -> m n", "m n k", bias=0)
    scaled = argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1
    return found if scaled else replace(found, panels=Panels("summa_addmm", 1, 2))


def _baddbmm(node: fx.Node) -> Annotation:
    added = ("", "n", "m n", "b m n")[rank_of(node, 0)]
    return _product(f"{added}, b m k, b k n -> b m n", "b m n k", bias=0)


def _linear(node: fx.Node) -> Annotation:
    if operands(node) == 3:
        found = _product("*b k, n k, n -> *b n", "*b n k", bias=2)
    else:
        found = _product("*b k, n k -> *b n", "*b n k")
    return replace(found, panels=Panels("summa_linear"))


def _matmul(node: fx.Node) -> Annotation:
    """numpy's rules: a vector on the left lacks m, one on the right lacks n; batch dims broadcast."""
    left, right = rank_of(node, 0), rank_of(node, 1)
    m, n = ("" if left == 1 else "m"), ("" if right == 1 else "n")
    a = f"*b {m} k" if left > 1 else "k"
    b = f"*b k {n}" if right > 1 else "k"
    runs = "*b " if left > 1 or right > 1 else ""
    found = _product(f"{a}, {b} -> {runs}{m} {n}", f"{runs}{m} {n} k")
    return replace(found, panels=Panels("summa_matmul")) if left > 1 and right == 2 else found


def _einsum(node: fx.Node) -> Annotation | None:
    """The equation is the rule, an ellipsis a run. A diagonal (a letter twice in an operand) is of whole dims."""
    equation = str(argument(node, 0, "equation")).replace(" ", "").replace("...", ".")
    left, arrow, right = equation.partition("->")
    letters = left.replace(",", "")
    if not arrow:
        right = "".join(sorted({letter for letter in letters if letters.count(letter) == 1} - {"."}))
        right = "." * ("." in letters) + right
    parts = left.split(",")
    if "." in letters and "." not in right:
        return None
    # capitals R, B and P would read as strategies
    named = {letter: f"{letter}_" if letter.isupper() else letter for letter in letters} | {".": "*dots"}
    for letter in {letter for part in parts for letter in part if part.count(letter) > 1}:
        named[letter] = f"^{named[letter]}"
    text = ", ".join(
        " ".join("_" if letter in part[:at] else named[letter] for at, letter in enumerate(part)) for part in parts
    )
    text += " -> " + " ".join(named[letter] for letter in right)
    factors = " ".join(named[letter] for letter in dict.fromkeys(letters)).replace("^", "")
    products = (factors,) if len(parts) > 1 else ()
    return Annotation(text, linear=tuple((index,) for index in range(len(parts))), products=products)


def _convolution(node: fx.Node) -> Annotation | None:
    """conv1d, conv2d, conv3d. Space is frozen: a shard would need its neighbours' border.

    None for as many groups as there are samples (kernels that each sample makes): these lie in the channels then.
    """
    space = rank_of(node, 1) - 2
    batch = "b " if rank_of(node) == space + 2 else ""
    kernel, output = [" ".join(f"^{name}" for name in names(space, prefix)) for prefix in ("k", "s")]
    hole = " ".join(["_"] * space)
    factors = f"{batch}o c {kernel} {output}".replace("^", "")
    groups = argument(node, 6, "groups", 1)
    if not isinstance(groups, int):
        return None
    if groups == 1:
        into, weight, out, bias = "c", "o c", "o", "o"
    else:
        into, weight, out, bias = "(g c)", "(g o) c", "(g o)", "(g o)"
        factors = f"g {factors}"
    text = f"{batch}{into} {hole}, {weight} {kernel}"
    if operands(node) == 3:
        rule = _product(f"{text}, {bias} -> {batch}{out} {output}", factors, bias=2)
    else:
        rule = _product(f"{text} -> {batch}{out} {output}", factors)
    return replace(rule, sizes={"g": Extent(groups)}) if groups > 1 else rule


def _transposed_convolution(node: fx.Node) -> Annotation | None:
    groups = argument(node, 6, "groups", 1)
    if not isinstance(groups, int):
        return None
    space = rank_of(node, 1) - 2
    batch = "b " if rank_of(node) == space + 2 else ""
    kernel, source = [" ".join(f"^{name}" for name in names(space, prefix)) for prefix in ("k", "s")]
    into, out = ("c", "o") if groups == 1 else ("(g c)", "(g o)")
    text = f"{batch}{into} {source}, {into} o {kernel}"
    output = f"{batch}{out} {' '.join(['_'] * space)}"
    factors = f"{'g ' * (groups > 1)}{batch}o c {kernel} {source}".replace("^", "")
    if operands(node) == 3:
        rule = _product(f"{text}, {out} -> {output}", factors, bias=2)
    else:
        rule = _product(f"{text} -> {output}", factors)
    return replace(rule, sizes={"g": Extent(groups)}) if groups > 1 else rule


def _tensordot(node: fx.Node) -> Annotation:
    """Sums over pairs of dims; the other dims follow each other."""
    pairs = [argument(node, index, name) for index, name in ((2, "dims_self"), (3, "dims_other"))]
    terms = [names(rank_of(node, operand), prefix) for operand, prefix in ((0, "l"), (1, "r"))]
    for index, (left, right) in enumerate(zip(*pairs, strict=True)):
        terms[0][left] = terms[1][right] = f"k{index}"
    after = [name for side in terms for name in side if not name.startswith("k")]
    factors = " ".join(dict.fromkeys([*terms[0], *terms[1]]))
    return _product(f"{' '.join(terms[0])}, {' '.join(terms[1])} -> {' '.join(after)}", factors)


def _inner(node: fx.Node) -> Annotation | None:
    """Sums of products over the last dims of both."""
    left, right = (" ".join(names(rank_of(node, operand) - 1, prefix)) for operand, prefix in ((0, "l"), (1, "r")))
    if not rank_of(node) or not rank_of(node, 1):
        return None
    return _product(f"{left} k, {right} k -> {left} {right}", f"{left} {right} k")


def _bilinear(node: fx.Node) -> Annotation:
    """One number of two vectors for each matrix: linear in each of the three, and jointly so with the bias."""
    bias = operands(node) == 4
    return Annotation(
        f"*b i, *b j, o i j{', o' * bias} -> *b o",
        linear=tuple((index, 3) if bias else (index,) for index in range(3)),
        affine=(3,) if bias else (),
        products=("*b o i j",),
    )


def _added(node: fx.Node) -> Annotation:
    """``addmv``, ``addr`` and ``addbmm``: a product, and what broadcasts to its dims is added."""
    name = str(node.target).split(".")[1]
    whole, left, right, factors = {
        "addmv": ("m", "m k", "k", "m k"),
        "addr": ("m n", "m", "n", "m n"),
        "addbmm": ("m n", "b m k", "b k n", "b m n k"),
    }[name]
    added = " ".join(whole.split()[len(whole.split()) - rank_of(node) :])
    return _product(f"{added}, {left}, {right} -> {whole}", factors, bias=0)


def _attention(node: fx.Node) -> Annotation | None:
    """Queries are independent of each other, keys are not (softmax). A causal mask counts the queries before."""
    query, key = graph.inputs(node)[:2]
    rank = query.fake.dim()
    if rank != key.fake.dim() or rank < 3:
        return None
    causal = bool(argument(node, 5, "is_causal", False))
    random = bool(argument(node, 4, "dropout_p", 0.0))
    mask = operands(node) == 4
    lead = "b " * (rank > 3) + " ".join(names(rank - 4, "e"))
    # The form is for as many keys as queries: with more queries some rows would have no end.
    fits = shape_of(query.fake)[-2] == shape_of(key.fake)[-2]
    q = "^q" if causal and not fits else "q"
    heads, shared = "h", "h"
    if argument(node, 7, "enable_gqa", False) and query.fake.shape[-3] != key.fake.shape[-3]:
        heads = "(h g)"
    text = f"{lead} {heads} {q} ^d, {lead} {shared} ^k ^d, {lead} {shared} ^k ^v"
    if mask:
        terms = [*lead.split(), heads, q, "^k"]
        text += ", " + " ".join(terms[len(terms) - rank_of(node, 3) :])
    batch = f"{lead} h {'g ' if heads != 'h' else ''}"
    return Annotation(
        f"{text} -> {lead} {heads} {q} ^v",
        linear=((2,),) if not random else (),
        products=(f"{batch} q k d", f"{batch} q k v"),
        random=random,
        forms={"q": LocalForm("query_sharded_attention", several=True)} if causal and fits else {},
    )


def _grouped_product(node: fx.Node) -> Annotation | None:
    """Tokens sorted by expert times their expert's matrix; ``offs`` says where each expert's tokens end.

    A rank with some of the experts computes their tokens' rows by a local form, which needs all of ``offs``.
    """
    if operands(node) != 3 or (rank_of(node, 0), rank_of(node, 1)) != (2, 3):
        return None
    found = _product("^t k, e k n, ^ends -> ^t n", "t k n")
    # Of torch's op; the form computes in the operands' type.
    same_type = argument(node, 4, "out_dtype") is None
    return (
        replace(found, forms={"e": LocalForm("own_experts_product", several=True)})
        if same_type
        else replace(found, text="^t k, ^e k n, ^ends -> ^t n")
    )


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    convolutions = ("conv1d", "conv2d", "conv3d")
    return {
        "aten.linear.default": _linear,
        "aten.mm.default": replace(_product("m k, k n -> m n", "m n k"), panels=Panels("summa_matmul")),
        "aten.bmm.default": _product("b m k, b k n -> b m n", "b m n k"),
        "aten.addmm.default": _addmm,
        "aten.baddbmm.default": _baddbmm,
        "aten.matmul.default": _matmul,
        "aten.mv.default": _product("m k, k -> m", "m k"),
        "aten.dot.default": _product("k, k ->", "k"),
        "aten.outer.default": _product("m, n -> m n", "m n"),
        "aten.einsum.default": _einsum,
        "aten.tensordot.default": _tensordot,
        "aten.inner.default": _inner,
        "aten.bilinear.default": _bilinear,
        **{f"aten.{name}.default": _added for name in ("addmv", "addr", "addbmm")},
        **{f"aten.{name}.default": _convolution for name in convolutions},
        **{f"aten.{name}.padding": _convolution for name in convolutions},
        **{
            f"aten.{name}": _transposed_convolution
            for name in ("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
        },
        "aten.scaled_dot_product_attention.default": _attention,
        "aten._grouped_mm.default": _grouped_product,
        # Only there once transformers is loaded, hence by name.
        "transformers.grouped_mm_fallback.default": _grouped_product,
    }

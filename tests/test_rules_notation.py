"""The notation: what a rule's text means, and what is wrong with it when it cannot be read or does not fit."""

from __future__ import annotations

import pytest

from autopart.passes.rules.notation import (
    Annotation,
    Extents,
    LocalForm,
    Message,
    Rule,
    RuleError,
    bind,
    parse,
    product_at,
)
from autopart.passes.rules.reshape import reshape_annotation
from autopart.passes.sizes import Extent


def shape(*sizes: int | str | None) -> Extents:
    """``shape(4, "16b")`` is ``[4, 16 * batch]``."""
    found: list[Extent | None] = []
    for size in sizes:
        if isinstance(size, str):
            found.append(Extent(int(size[:-1] or 1), batched=True))
        else:
            found.append(None if size is None else Extent(size))
    return tuple(found)


def bound(text: str, inputs: list[Extents], outputs: list[Extents], **sizes: int) -> Rule:
    return bind(Annotation(text, sizes={name: Extent(size) for name, size in sizes.items()}), inputs, outputs)


def test_a_run_takes_the_remaining_dims() -> None:
    rule = bound("*b k, n k -> *b n", [shape("b", 4, 8), shape(6, 8)], [shape("b", 4, 6)])
    assert str(rule) == "b0 b1 k, n k -> b0 b1 n"
    assert rule.sizes == {"b0": Extent(1, True), "b1": Extent(4), "k": Extent(8), "n": Extent(6)}
    assert rule.factors == ("b0", "b1", "k", "n")


def test_shorter_runs_align_to_the_right_and_ones_broadcast() -> None:
    rule = bound("*d, *d -> *d", [shape(4, 1, 6), shape(5, 1)], [shape(4, 5, 6)])
    assert str(rule) == "d0 1 d2, d1 1 -> d0 d1 d2"


def test_a_product_gives_the_size_of_its_missing_factor() -> None:
    rule = bound("b (h d) -> b h d", [shape(2, 12)], [shape(2, 3, 4)])
    assert rule.sizes["h"] == Extent(3) and rule.sizes["d"] == Extent(4)
    rule = bound("(^c n) -> n, n", [shape("8b")], [shape("4b"), shape("4b")])
    assert rule.size("c") == Extent(2) and rule.size("n") == Extent(4, True)
    assert bound("(g c) -> (g c)", [shape(12)], [shape(12)], g=3).size("c") == Extent(4)


def test_frozen_factors_runs_and_holes() -> None:
    rule = bound("^*s n _, ^v -> ^*s n _", [shape(2, 3, 4, 5), shape(7)], [shape(2, 3, 4, 9)])
    assert rule.factors == ("n",)
    assert rule.frozen >= {"s0", "s1", "v"}


def test_a_size_that_is_no_multiple_of_the_batch_freezes_its_factor() -> None:
    rule = bound("a b -> a b", [shape(None, 4)], [shape(None, 4)])
    assert rule.factors == ("b",) and rule.sizes["a"] is None


def test_a_form_that_exchanges_an_unknown_size_freezes_its_factor() -> None:
    form = LocalForm("f", messages=(Message("all_reduce", "forward", ("t",), 4),))
    annotation = Annotation("t v -> t", forms={"v": form})
    assert bind(annotation, [shape("1b", 4)], [shape("1b")]).forms
    rule = bind(annotation, [shape(None, 4)], [shape(None)])
    assert not rule.forms and "v" in rule.frozen


def test_a_known_and_an_unknown_size_of_one_factor_are_equal_and_unknown() -> None:
    """As where a router gives as many positions as there are rows, whose number depends on the data."""
    for first, second in ((24, None), (None, 24)):
        rule = bound("i, i d -> i d", [shape(first), shape(second, 4)], [shape(first, 4)])
        assert rule.factors == ("d",) and rule.sizes["i"] is None
    rule = bound("h d, (h d) -> (h d)", [shape(2, 4), shape(None)], [shape(8)])
    assert rule.factors == ()


def test_scalars_are_written_as_nothing() -> None:
    assert bound("*d -> ", [shape(2, 3)], [()]).outputs == ((),)
    assert bound(" -> ", [()], [()]).inputs == ((),)
    assert bound("-> a", [], [shape(3)]).inputs == ()
    assert bound("*d, *d, -> *d", [shape(3), shape(3), ()], [shape(3)]).inputs[2] == ()


def test_products_expand_runs() -> None:
    annotation = Annotation("*b k, n k -> *b n", products=("*b n k",))
    rule = bind(annotation, [shape("b", 4, 8), shape(6, 8)], [shape("b", 4, 6)])
    assert rule.products == (("b0", "b1", "n", "k"),)
    assert product_at(rule, rule.products[0], batch=3) == 3 * 4 * 6 * 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b", "one '->'"),
        ("a -> b -> c", "one '->'"),
        ("(a b -> a", "not closed"),
        ("a b) -> a", "parentheses"),
        ("() -> a", "parentheses"),
        ("(a (b c)) -> a", "parentheses"),
        ("a a -> a", "twice"),
        ("*a *b -> *a", "at most one run"),
        ("(*a b) -> b", "named factors"),
        ("(a _) -> a", "named factors"),
        ("a + b -> a", "cannot read"),
        ("2 -> 2", "cannot read"),
        ("*a, a -> a", "both a run and a factor"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "message"),
    [
        ("a, b -> a", [shape(2)], [shape(2)], "2 operands and 1 outputs, the op 1 and 1"),
        ("a b -> a", [shape(2)], [shape(2)], "does not fit a tensor of 1 dims"),
        ("a -> a", [shape(2, 3)], [shape(2)], "does not fit a tensor of 2 dims"),
        ("a -> a", [shape(2)], [shape(3)], "sizes 2 and 3"),
        ("1 -> ", [shape(2)], [()], "broadcast dim"),
        ("(a b) -> a b", [shape(7)], [shape(2, 3)], "is not made of"),
        ("(a b) -> a", [shape(7)], [shape(2)], "does not hold"),
        ("(a b) -> (b a)", [shape(6)], [shape(6)], "are not known"),
    ],
)
def test_what_does_not_fit(text: str, inputs: list[Extents], outputs: list[Extents], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        bound(text, inputs, outputs)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (shape("b", 16, 64), shape("16b", 64), "f0 f1 f2 -> (f0 f1) f2"),
        (shape("16b", 64), shape("b", 16, 64), "(f0 f1) f2 -> f0 f1 f2"),
        (shape("16b", 2), shape("32b"), "f0 f1 -> (f0 f1)"),
        (shape("b", 16, 192), shape("b", 16, 12, 16), "f0 f1 (f2 f3) -> f0 f1 f2 f3"),
        (shape("b", 12, 16), shape("b", 192), "f0 f1 f2 -> f0 (f1 f2)"),
        (shape(2, 6), shape(4, 3), "f0 (f1 f2) -> (f0 f1) f2"),
        (shape(2, 1, 3), shape(6, 1), "f0 1 f1 -> (f0 f1) 1"),
        (shape(5, 2, 3), shape(5, 3, 2), "f0 ^f1 ^f3 -> f0 ^f2 ^f4"),
        (shape("b", 3), shape(3, "b"), "^f0 ^f3 -> ^f1 ^f2"),
        (shape(1, 1), (), "1 1 -> "),
    ],
)
def test_reshape_factors_follow_from_the_shapes(before: Extents, after: Extents, text: str) -> None:
    annotation = reshape_annotation(before, after)
    assert annotation is not None
    # Names are given in the order in which factors are found; only their identity matters.
    assert str(bind(annotation, [before], [after])) == text


def test_reshape_of_unknown_or_no_elements_has_no_rule() -> None:
    assert reshape_annotation(shape(None, 2), shape(None, 2)) is None
    assert reshape_annotation(shape(0, 2), shape(0)) is None

"""The check of rules finds what is wrong with a rule, and knows ops without one."""

from __future__ import annotations

import operator

import pytest
import torch

from autopart.passes.rules import RULES, Annotation, strategies
from autopart.passes.rules.check import check
from autopart.passes.rules.examples import call, f
from autopart.runtime.local_forms import summa


def test_a_wrong_rule_is_found() -> None:
    node, _ = call(torch.ops.aten.softmax.int, f(4, 6), -1)
    results = check(node, rules=RULES.extended({"aten.softmax.int": "b n -> b n"}))
    assert [result.name for result in results if not result.ok] == ["n", "n/3"]


def test_a_wrong_sum_is_found() -> None:
    node, _ = call(torch.ops.aten.amax.default, f(4, 6), [1])
    results = check(node, rules=RULES.extended({"aten.amax.default": "b n -> b"}))
    assert [result.name for result in results if not result.ok] == ["n", "n/3"]


def test_a_wrong_claim_of_linearity_is_found() -> None:
    node, _ = call(torch.ops.aten.relu.default, f(4, 6))
    rules = RULES.extended({"aten.relu.default": Annotation("*d -> *d", linear=((0,),))})
    assert [result.name for result in check(node, rules=rules) if not result.ok] == ["P"]


def test_an_added_bias_must_be_affine() -> None:
    node, _ = call(torch.ops.aten.linear.default, f(4, 6), f(8, 6), f(8))
    rules = RULES.extended({"aten.linear.default": "*b k, n k, n -> *b n"})
    broken = [result for result in check(node, rules=rules) if not result.ok]
    assert {result.name for result in broken} == {"k", "k/3"} and "output 0" in broken[0].message


def test_an_unknown_op_is_replicated_and_that_is_checked() -> None:
    node, tensors = call(torch.ops.aten.linalg_multi_dot.default, [f(4, 4), f(4, 4)])
    assert RULES.rule(node) is None
    results = check(node, operands=tensors)
    assert [(result.name, result.ok) for result in results] == [("R", True), ("B", True)]


def test_three_ranks() -> None:
    node, _ = call(torch.ops.aten.linear.default, f(3, 6), f(12, 6), f(12))
    results = check(node, parts=3)
    assert {result.name for result in results} >= {"b0", "n", "n/2", "k", "k/2"}
    assert all(result.ok for result in results)


def test_getitem_is_not_an_op() -> None:
    node, _ = call(torch.ops.aten.topk.default, f(4, 6), 2)
    values = node.graph.call_function(operator.getitem, (node, 0))
    values.meta["val"] = node.meta["val"][0]
    assert values not in strategies(node.graph, 2)


def test_two_axes_together() -> None:
    """Products panel by panel are run on threads as well, and a form that forgets its sums is noticed."""
    node, _ = call(torch.ops.aten.linear.default, f(4, 8), f(12, 8), f(12))
    together = [result for result in check(node) if len(result.strategies) == 2]
    assert all(result.ok for result in together)
    assert {"summa_b0,summa_n", "summa_n/3,summa_b0"} <= {result.name for result in together}


def test_a_broken_form_on_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summa, "_sums", lambda parts, axis: list(parts)[axis.index])
    node, _ = call(torch.ops.aten.mm.default, f(4, 8), f(8, 12))
    broken = {result.name: result.message for result in check(node) if not result.ok}
    assert "gradient of operand 0" in broken["summa_m,summa_n"]

"""Every rule against the op itself: split by each strategy, run, combine, compare, forward and backward."""

from __future__ import annotations

import pytest
import torch

from autopart.passes.rules import RULES
from autopart.passes.rules.catalogue import cases
from autopart.passes.rules.check import check
from autopart.passes.rules.examples import Case, call, overload

CASES = cases()
# Refuses float64; its rule is that of transformers' op of the same meaning, which is in the catalogue.
NOT_IN_FLOAT64 = {"aten._grouped_mm.default"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_strategy_equals_the_whole(case: Case) -> None:
    torch.manual_seed(1)
    if case.op.startswith("transformers."):
        pytest.importorskip("transformers.integrations.moe")
    node, tensors = call(overload(case.op), *case.args, **case.kwargs)
    for index in case.constant:
        node.all_input_nodes[index].meta["differentiable"] = False
    results = check(node, operands=tensors)
    assert not [f"{result.name}: {result.message}" for result in results if not result.ok]
    assert len(results) >= case.minimum, [result.name for result in results]
    rule = RULES.rule(node)
    assert all(result.shapes_only == (rule is not None and rule.random) for result in results)


def test_every_op_in_the_book_is_in_the_catalogue() -> None:
    assert set(RULES.entries) - {case.op for case in CASES} == NOT_IN_FLOAT64

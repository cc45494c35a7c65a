"""Experts sharded: each rank computes its own experts' tokens; and query heads on more ranks than key-value heads."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from torch import fx

from autopart.passes.rules import Strategy
from autopart.runtime.placement import shard
from autopart.verify import Subject, prepare
from families import BATCH, SEQ, family
from forcing import forced, op, run

INNER, WIDTH, CHOSEN = 2 * 64, 32, 2
"""Of Mixtral: outputs of the first grouped product, model width, experts per token."""


@functools.lru_cache(maxsize=1)
def subject_of(name: str) -> Subject:
    item = family(name)
    return prepare(item.build(), (), item.inputs(item.batch))


def by_expert(node: fx.Node, strategy: Strategy) -> bool:
    """The experts' weights and products by expert, all else whole."""
    if node.op != "call_function":
        return True
    if any("_experts_" in item.name for item in node.all_input_nodes):
        return strategy.outputs == (shard(0),)
    return strategy.name == ("e" if "grouped_mm" in op(node) else "R")


@pytest.mark.parametrize("parts", [2, 4])
def test_mixtral(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A summand of each product per rank: its experts' rows. One sum after each forward, and of its gradient."""
    plan = forced(subject_of("mixtral-1"), parts, by_expert)
    experts = {name: placement for name, placement in plan.storage.items() if ".experts." in name}
    assert len(experts) == 2 and set(experts.values()) == {"S0"}
    result, source = run(subject_of("mixtral-1"), plan, tmp_path, monkeypatch)
    assert source.count("local_forms.own_experts_product(") == 2
    assert len(re.findall(rf"parameter\({4 // parts}, (128, 32|32, 64)", source)) == 2
    tokens = BATCH * SEQ * CHOSEN
    moved = sum(size for _, size in result.traffic[0].counted.values())
    # forward both products' sums; backward their operands' gradients
    assert moved == 8 * tokens * (INNER + WIDTH + WIDTH + INNER // 2)


def by_query_head(node: fx.Node, strategy: Strategy) -> bool:
    """Attention by query heads; keys and values projected whole on every rank."""
    read = " ".join(item.name for item in node.all_input_nodes)
    if node.op != "call_function":
        return True
    if "k_proj" in read or "v_proj" in read:
        return strategy.name in ("R", "B")
    return strategy.name == "h" if op(node) == "scaled_dot_product_attention" else True


@pytest.mark.parametrize("name", ["llama-1", "mixtral-1"])
def test_fewer_key_value_heads_than_ranks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on four ranks that share two pairs of key and value heads, repeated as the model does it."""
    plan = forced(subject_of(name), 4, by_query_head)
    placed = {key.split(".")[-2]: placement for key, placement in plan.storage.items() if "_proj.weight" in key}
    assert placed["q_proj"] == "S0" and placed["o_proj"] == "S1"
    assert placed["k_proj"] == placed["v_proj"] == "B"
    run(subject_of(name), plan, tmp_path, monkeypatch)

"""Plans with several tensor axes: files, errors, and training that goes on from a checkpoint under another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from autopart.analysis import Analysis, analyze
from autopart.plan import Plan, StagePlan
from autopart.precision import eager_in_float64
from autopart.realize import read_strategies, realize, storage_names, strategy_names
from autopart.runtime import ParallelModule, checkpoint
from autopart.runtime.errors import PlanError
from autopart.runtime.placement import Placement
from families import captured, family
from launch import launch
from programs import Choose, randomly, tensors_of
from schemes import scheme

NAME, BATCH, HALF, END = "gpt2-1", 4, 2, 4
XY = (("x", 2), ("y", 2))


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyze(captured(NAME))


def plan_of(analysis: Analysis, axes: tuple[tuple[str, int], ...], choose: Choose) -> Plan:
    """One stage on these tensor axes, with these strategies."""
    strategies, storage = choose(analysis.graph, *(parts for _, parts in axes))
    named = {node: chosen for node, chosen in strategies.items() if node in analysis.block_of}
    ranks = 1
    for _, parts in axes:
        ranks *= parts
    stage = StagePlan(tuple(range(ranks)), (("dp", 1), *axes), (0, len(analysis.blocks)))
    return Plan(
        fingerprint=analysis.program.fingerprint,
        model=NAME,
        cluster="by hand",
        batch=BATCH,
        dtype="float64",
        schedule="1f1b",
        microbatches=1,
        stages=(stage,),
        strategies=strategy_names(analysis, named),
        storage=storage_names(analysis, storage),
    )


def test_what_no_op_reads_is_stored_whole_whatever_its_like_is() -> None:
    analysis = analyze(captured("gpt2"))
    cut = (Placement.parse("S1"),)
    layers = [f"transformer.h.{number}.mlp.c_fc.weight" for number in range(4)]
    assert storage_names(analysis, dict.fromkeys(layers, cut)) == {"transformer.h.*.mlp.c_fc.weight": "S1"}
    assert storage_names(analysis, dict.fromkeys(layers[1:], cut)) == dict.fromkeys(layers[1:], "S1")


def train(model: nn.Module, folder: str, start: int, end: int) -> tuple[list[float], dict[str, Tensor]]:
    """Steps from the start or from the checkpoint, with clipping: losses and norms, and the weights afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if start:
        assert checkpoint.load(folder, model, optimizer).step == start
    found: list[float] = []
    parallel = isinstance(model, ParallelModule)
    for step in range(start, end):
        inputs = family(NAME).inputs(BATCH)
        ids = (inputs["input_ids"] * 5 + step) % 96
        with nullcontext() if parallel else eager_in_float64(model):
            loss = model(**{**inputs, "input_ids": ids, "labels": ids}).loss
        loss.backward()
        whole = partial(clip_grad_norm_, model.parameters())
        norm = (model.clip_grad_norm_ if isinstance(model, ParallelModule) else whole)(0.5)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), float(norm)]
    if end == HALF:
        checkpoint.save(folder, model, optimizer, step=end)
    return found, dict(model.state_dict())


def in_parallel(directory: str, folder: str, start: int, end: int) -> tuple[list[float], dict[str, Tensor]]:
    return train(ParallelModule(directory, tensors_of(family(NAME).build())), folder, start, end)


def compare(
    found: tuple[list[float], Mapping[str, Tensor]], expected: tuple[list[float], Mapping[str, Tensor]]
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=0)
    for key, tensor in expected[1].items():
        if "c_attn.bias" not in key:  # a third of it has a gradient of rounding noise
            torch.testing.assert_close(found[1][key], tensor, rtol=1e-8, atol=1e-9, msg=key)


def test_training_goes_on_under_another_mesh(tmp_path: Path, analysis: Analysis) -> None:
    """Two steps on 2x2, products panel by panel, then two more on one axis of two ranks, and by the plain model."""
    square = plan_of(analysis, XY, scheme("2d"))
    assert any("summa_" in text for text in square.strategies.values())
    again = Plan.from_json(square.to_json())
    assert again == square
    realize(analysis.program, again, analysis).save(tmp_path / "square")
    pair = plan_of(analysis, (("tp", 2),), randomly(1))
    realize(analysis.program, pair, analysis).save(tmp_path / "pair")

    folder = str(tmp_path / "checkpoint")
    expected = train(family(NAME).build(), str(tmp_path / "plain"), 0, HALF)
    for found in launch(in_parallel, 4, str(tmp_path / "square"), folder, 0, HALF, timeout=400.0):
        compare(found, expected)
    expected = train(family(NAME).build(), str(tmp_path / "plain"), HALF, END)
    compare(train(family(NAME).build(), folder, HALF, END), expected)
    for found in launch(in_parallel, 2, str(tmp_path / "pair"), folder, HALF, END, timeout=400.0):
        compare(found, expected)
    for found in launch(in_parallel, 4, str(tmp_path / "square"), folder, HALF, END, timeout=400.0):
        compare(found, expected)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("strategies", "m/b,m/b", "do not hold together"),
        ("strategies", "m/b", "1 strategies for 2 tensor axes"),
        ("strategies", "summa_m/b,n", "panel by panel there is"),
        ("strategies", "summa_m/b,summa_n/5", "not offered"),
        ("storage", "S0,S0", "sharded inside the shares of the other"),
    ],
)
def test_what_does_not_hold_together_is_refused(analysis: Analysis, field: str, text: str, message: str) -> None:
    plan = plan_of(analysis, XY, scheme("2d"))
    name = "transformer.h.*.mlp.c_fc" + (":addmm" if field == "strategies" else ".weight")
    if field == "strategies":
        wrong = replace(plan, strategies={**plan.strategies, name: text})
    else:
        wrong = replace(plan, storage={**plan.storage, name: text})
    with pytest.raises(PlanError, match=message):
        read_strategies(analysis, wrong, XY)


def test_names_are_read_back(analysis: Analysis) -> None:
    chosen: Any = scheme("2d")(analysis.graph, 2, 2)[0]
    strategies, _ = read_strategies(analysis, plan_of(analysis, XY, scheme("2d")), XY)
    for node, found in strategies.items():
        assert [str(item) for item in found] == [str(item) for item in chosen[node]]
        assert [item.form for item in found] == [item.form for item in chosen[node]]

"""Dropout that does not depend on the plan: masks, losses and gradients equal those of one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_context_parallel import Causal, causal_inputs
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import Analysis, analyze
from autopart.api import load
from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.precision import float64_throughout
from autopart.realize import realize
from autopart.runtime import invariant
from autopart.runtime.errors import PlanError
from autopart.runtime.invariant import Draw, Share
from autopart.runtime.placement import Placement, take_share
from autopart.runtime.structure import flatten
from autopart.tracing import capture
from autopart.verify.rank import INPUTS, REFERENCE, WEIGHTS, adamw, loss_of, train_and_compare
from clusters import ideal
from families import family
from forcing import is_parameter, op
from launch import launch

STEPS = 3
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2, "pins": {"transformer.h.1": 1}},
    "tp2": {"tp": 2},
    "sequence": {"tp": 2},
    "dp2": {"dp": 2},
    "dp2xtp2 microbatched": {"dp": 2, "tp": 2, "microbatches": 2},
    "recomputed": {"pp": 2, "microbatches": 2, "recompute": "full"},
}


@functools.lru_cache(maxsize=1)
def captured() -> tuple[nn.Module, Program, dict[str, Tensor]]:
    item = family("gpt2", dropout=0.1)
    model, inputs = item.build(), item.inputs(item.batch)
    with float64_throughout():
        program = capture(model, (), inputs, check_eval=False)
    return model, program, inputs


def planned(analysis: Analysis, dropout: str, limits: dict[str, Any]) -> Plan:
    degrees = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, "recompute": "none", **limits}
    devices = degrees["pp"] * degrees["dp"] * degrees["tp"]
    return make_plan(analysis.program, ideal(devices), batch=8, analysis=analysis, dropout=dropout, **degrees)


def seeded_training(*arguments: Any) -> dict[str, Any]:
    torch.manual_seed(11)
    return train_and_compare(*arguments)


def train_alone(program: Path, job: Path, inputs: dict[str, Tensor]) -> list[float]:
    """The one-process program: its losses; gradients and parameters are left as the reference."""
    torch.manual_seed(11)
    model = load(program, torch.load(job / WEIGHTS), device=torch.device("cpu")).train()
    optimizer = adamw(list(model.parameters()), 1e-3)
    assert optimizer is not None
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        loss = loss_of(flatten(model(**inputs))[0], model.manifest.loss)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            found = {name: tensor.grad for name, tensor in model.named_parameters()}
            gradients = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
        optimizer.step()
        optimizer.zero_grad()
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    torch.save({"gradients": gradients, "state": state}, job / REFERENCE)
    return losses


def job_of(job: Path, model: nn.Module, program: Program, inputs: dict[str, Tensor]) -> tuple[Path, list[float]]:
    """The folder of a comparison, and the losses of the program for one process."""
    torch.save(dict(model.state_dict()), job / WEIGHTS)
    torch.save(inputs, job / INPUTS)
    analysis = analyze(program)
    realize(program, planned(analysis, "invariant", {}), analysis).save(job / "alone")
    return job, train_alone(job / "alone", job, inputs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    return job_of(tmp_path_factory.mktemp("job"), *captured())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "microbatched" in name else ()) for name in PLANS]
)
def test_every_plan_drops_the_same(name: str, alone: tuple[Path, list[float]], tmp_path: Path) -> None:
    job, losses = alone
    _, program, _ = captured()
    analysis = analyze(program)
    if name == "sequence":
        by_sequence(analysis)
    plan = planned(analysis, "invariant", PLANS[name])
    realize(program, plan, analysis).save(tmp_path / "program")
    texts = [path.read_text() for path in sorted((tmp_path / "program").glob("stage_*.py"))]
    text = "".join(texts)
    assert all("invariant.dropout(" in one for one in texts), "each stage draws"
    assert "invariant.attention(" in text and "F.dropout" not in text
    if name == "sequence":
        assert '"S1", samples="S0"' in text
    arguments = (str(tmp_path / "program"), str(job), STEPS, 1e-3, "")
    for found in launch(seeded_training, plan.device_count, *arguments):
        assert found["losses"] == pytest.approx(losses, rel=1e-12)
        assert max(found["gradients"].values()) < 1e-12
        assert max(found["state"].values()) < 1e-9


def by_sequence(analysis: Analysis) -> None:
    """On two ranks: parameters are whole, attention has half of the queries."""
    for node, offered in analysis.strategies(2).items():
        if is_parameter(node):
            analysis._strategies[(2,)][node] = tuple(item for item in offered if item.name == "B")
        elif op(node) == "scaled_dot_product_attention":
            analysis._strategies[(2,)][node] = tuple(item for item in offered if item.name == "q")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Path, list[float]]:
    """Attention that is causal by the op's own flag, so that a shard of queries has to know its rows."""
    model, inputs = Causal(width=16, hidden=16, dropout=0.2).double(), causal_inputs()
    program = capture(model, (), inputs, check_eval=False)
    return program, *job_of(tmp_path_factory.mktemp("job"), model, program, inputs)


@pytest.mark.parametrize("dropout", ["invariant", "torch"])
def test_causal_queries_are_sharded(dropout: str, causal: tuple[Program, Path, list[float]], tmp_path: Path) -> None:
    program, job, losses = causal
    analysis = analyze(program)
    by_sequence(analysis)
    realize(program, planned(analysis, dropout, {"tp": 2}), analysis).save(tmp_path / "program")
    text = (tmp_path / "program" / "stage_0.py").read_text()
    found = launch(seeded_training, 2, str(tmp_path / "program"), str(job), STEPS, 1e-3, "")
    if dropout == "torch":
        assert text.count("dropout_p=0.2 if self.training else 0.0") == 2
        assert "local_forms.query_sharded_attention(" in text
        assert found[0]["losses"] == found[1]["losses"]
        assert 1e-6 < abs(found[0]["losses"][0] - losses[0]) < 0.5
        return
    assert "invariant.attention(" in text and "local_forms" not in text
    for rank in found:
        assert rank["losses"] == pytest.approx(losses, rel=1e-12)
        assert max(rank["gradients"].values()) < 1e-12
        assert max(rank["state"].values()) < 1e-9


def test_torchs_own_dropout_depends_on_the_plan(alone: tuple[Path, list[float]], tmp_path: Path) -> None:
    job, losses = alone
    _, program, _ = captured()
    analysis = analyze(program)
    realize(program, planned(analysis, "torch", {"tp": 2}), analysis).save(tmp_path / "program")
    found = launch(seeded_training, 2, str(tmp_path / "program"), str(job), STEPS, 1e-3, "")
    assert abs(found[0]["losses"][0] - losses[0]) > 1e-6
    assert losses[0] != losses[1]


# -- the functions --------------------------------------------------------------------------------------------------


WHOLE = Draw(5, (), (), (), None, Share())


def test_masks_have_the_probability_and_differ_between_calls() -> None:
    shape, device = torch.Size((200, 300)), torch.device("cpu")
    masks = [replace(WHOLE, key=key).dropped(shape, 0.1, device) for key in range(4)]
    for mask in masks:
        assert mask.double().mean().item() == pytest.approx(0.1, abs=0.005)
        for dim in (0, 1):
            assert mask.double().mean(dim).std().item() == pytest.approx((0.09 / shape[dim]) ** 0.5, rel=0.2)
    both = (masks[0] & masks[1]).double().mean().item()
    assert both == pytest.approx(0.01, abs=0.002)


@pytest.mark.parametrize(
    ("placements", "samples"),
    [("S1,R", "S0"), ("S2/2,S2/8", "S0"), ("S0/b,S2", "S0"), ("B,S2/2", "S1/3"), ("R,R", "")],
)
def test_a_part_has_its_part_of_the_mask(placements: str, samples: str) -> None:
    """Of ``[8, 6, 16]`` on axes of 2 and 2 ranks; with ``S1/3`` dim 1 is three blocks of two samples."""
    shape, device = torch.Size((8, 6, 16)), torch.device("cpu")
    whole = WHOLE.dropped(shape, 0.5, device)
    own = tuple(map(Placement.parse, placements.split(",")))
    held = Placement.parse(samples) if samples else None
    batch, count = (4, 2) if samples == "S0" else (2, 1)
    for first in range(0, batch if samples else 1, count):
        part = whole
        if held is not None:
            part = whole.unflatten(held.dim, (held.outer, -1))
            each = part.size(held.dim + 1) // batch
            part = part.narrow(held.dim + 1, first * each, count * each).flatten(held.dim, held.dim + 1)
        for indices in ((0, 0), (0, 1), (1, 0), (1, 1)):
            expected = take_share(part, own, (2, 2), indices, count)
            draw = Draw(5, own, (2, 2), indices, held, Share(first, count, batch))
            assert torch.equal(draw.dropped(expected.shape, 0.5, device), expected)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_attention_is_torchs_own_without_dropout(mask: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = {"bool": torch.rand(5, 5) < 0.5, "float": torch.randn(5, 5, dtype=torch.float64)}.get(mask)
    if mask == "bool":
        assert given is not None
        given[0] = False  # a row that sees nothing
    options: dict[str, Any] = {"attn_mask": given, "is_causal": mask == "causal", "scale": 0.2, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    found = invariant.attention(query, key, value, **options, training=True, draw=WHOLE)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value))
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (query, key, value)), wanted)


@pytest.mark.parametrize("training", [True, False])
def test_a_shard_of_causal_queries_has_its_rows(training: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    whole = invariant.attention(query, key, value, None, 0.5, True, training=training, draw=WHOLE)
    for index, rows in enumerate(query.chunk(3, 2)):
        draw = Draw(5, (Placement.parse("S2"),), (3,), (index,), None, Share())
        found = invariant.attention(rows, key, value, None, 0.5, True, training=training, draw=draw)
        torch.testing.assert_close(found, whole.chunk(3, 2)[index])


def test_other_random_numbers_are_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) + torch.rand_like(x)).square().sum()

    program = capture(Noisy(), (torch.randn(4, 4),), check_eval=False)
    plan = make_plan(program, ideal(1), dropout="invariant")
    with pytest.raises(PlanError, match=r"rand_like.*knows dropout and attention only"):
        realize(program, plan)
    with pytest.raises(PlanError, match="dropout is one of torch, invariant"):
        make_plan(program, ideal(1), dropout="always")

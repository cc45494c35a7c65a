"""Schemes of tensor sharding forced by name: what their plans say, that they train equally, and what is refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from autopart.analysis import Analysis, analyze
from autopart.offers import Offers
from autopart.passes import graph as graphs
from autopart.passes.program import Role
from autopart.passes.rules import name_of
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.prices import Chosen
from autopart.realize import read_strategies
from autopart.runtime.errors import PlanError
from autopart.runtime.placement import Placements
from autopart.scheme_choices import role_of, weight_of
from autopart.tensor_scheme import TensorScheme
from autopart.tracing import capture
from autopart.verify import Subject, prepare
from clusters import ideal
from families import family
from forcing import run
from schemes import share

BATCH = 4


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    subject = prepare(item.build(), kwargs=item.inputs(BATCH))
    return subject, analyze(subject.program)


def planned(name: str, scheme: str, ranks: int) -> tuple[Plan, Mapping[fx.Node, Chosen], Mapping[str, Placements]]:
    subject, analysis = subject_of(name)
    limits = {"batch": BATCH, "pp": 1, "dp": 1, "microbatches": 1, "recompute": "none"}
    plan = make_plan(subject.program, ideal(ranks), analysis=analysis, tensor_scheme=scheme, **limits)  # type: ignore[arg-type]
    strategies, storage = read_strategies(analysis, plan, plan.stages[0].mesh[1:])
    return plan, strategies, storage


def products(strategies: Mapping[fx.Node, Chosen]) -> Iterator[tuple[fx.Node, int, Chosen]]:
    """Contractions with a weight, which operand it is, and how they run."""
    for node, chosen in strategies.items():
        weight = weight_of(node)
        if weight is not None and any(word in name_of(node) for word in ("linear", "mm", "matmul")):
            yield node, weight, chosen


def is_norm(node: fx.Node) -> bool:
    """Whether it reads a vector of parameters, and is no product: a norm, or its scale where it is written out."""
    vectors = [
        value for value in graphs.inputs(node) if value.node.op == "placeholder" and value.node.meta["val"].dim() == 1
    ]
    parameters = [value for value in vectors if value.node.meta["role"] is Role.PARAMETER]
    return bool(parameters) and weight_of(node) is None


def on_sequence(node: fx.Node, chosen: Chosen) -> bool:
    """Whether the first axis shards dim 1 of a result [samples, tokens, hidden]."""
    value, placement = node.meta["val"], chosen[0].outputs[0]
    return isinstance(value, Tensor) and value.dim() == 3 and placement.is_shard and placement.dim == 1


@pytest.mark.parametrize(
    ("name", "scheme", "axes"),
    [
        pytest.param("gpt2-1", "1d", (2,), marks=pytest.mark.slow),
        ("gpt2-1", "sp", (2,)),
        pytest.param("gpt2-1", "2d", (2, 2), marks=pytest.mark.slow),
        pytest.param("llama-1", "1d", (2,), marks=pytest.mark.slow),
        pytest.param("llama-1", "sp", (2,), marks=pytest.mark.slow),
        pytest.param("llama-1", "2d", (2, 2), marks=pytest.mark.slow),
        pytest.param("gpt2-1", "2.5d", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("gpt2-1", "3d", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("llama-1", "2.5d", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("llama-1", "3d", (2, 2, 2), marks=pytest.mark.slow),
    ],
)
def test_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, scheme: str, axes: tuple[int, ...]) -> None:
    """A plan lays ranks on the scheme's axes, runs its products so, holds its shares, and trains equally."""
    plan, strategies, storage = planned(name, scheme, math.prod(axes))
    assert tuple(parts for _, parts in plan.stages[0].mesh[1:]) == axes
    assert not plan.notes
    roles = [tuple(role_of(item, weight) for item in chosen) for _, weight, chosen in products(strategies)]
    wanted: dict[str, set[tuple[str, ...]]] = {
        "1d": {("columns",), ("inner",)},
        "sp": {("columns",), ("inner",)},
        "2d": {("panels", "panels")},
        "2.5d": {("panels", "panels", "rows")},
        "3d": {("rows", "inner", "columns"), ("rows", "columns", "inner")},
    }
    assert len(roles) >= 5
    assert set(roles) <= wanted[scheme]
    if len(axes) == 1:
        norms = [on_sequence(node, chosen) for node, chosen in strategies.items() if is_norm(node)]
        assert norms.count(scheme == "sp") == len(norms) >= 3
        assert scheme == "sp" or not any(on_sequence(node, chosen) for node, chosen in strategies.items())
    # of every matrix a rank holds one part in as many as there are ranks; under 2.5d at most one in q^2
    for key, tensor in family(name).build().named_parameters():
        if tensor.dim() > 1:
            parts = tensor.numel() // share(tensor.shape, storage[key], axes)
            assert parts == math.prod(axes) or (scheme == "2.5d" and parts == 4), key
    run(subject_of(name)[0], plan, tmp_path, monkeypatch)


class Uneven(nn.Module):
    """The second product's columns do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(torch.nn.functional.gelu(self.first(x))).square().mean()}


@functools.lru_cache(maxsize=1)
def uneven() -> Analysis:
    return analyze(capture(Uneven(), (), {"x": torch.randn(2, 8, 8)}, check_eval=False))


@pytest.mark.parametrize(("scheme", "axes"), [("2d", "2x2"), ("2.5d", "2x2x2"), ("3d", "2x2x2")])
def test_a_product_that_does_not_divide_is_left_free(scheme: str, axes: str) -> None:
    analysis = uneven()
    ranks = math.prod(map(int, axes.split("x")))
    limits = {"pp": 1, "dp": 1, "tp": axes, "microbatches": 1}
    plan = make_plan(analysis.program, ideal(ranks), analysis=analysis, tensor_scheme=scheme, **limits)  # type: ignore[arg-type]
    assert plan.notes == (f"the tensor scheme {scheme} has no way to run second:linear on {axes} ranks",)
    strategies, _ = read_strategies(analysis, plan, plan.stages[0].mesh[1:])
    first = next(chosen for node, _, chosen in products(strategies) if analysis.keys[node] == "first:linear")
    assert ("summa_" in first[0].name) is (scheme != "3d")
    assert all(item.outputs[0].is_shard or item.inputs[1].is_shard for item in first)


def test_products_panel_by_panel_are_offered_on_equal_axes() -> None:
    """Without a scheme too, beside everything else."""
    analysis = uneven()
    node = next(node for node in analysis.keys if analysis.keys[node] == "first:linear")
    offered = Offers(analysis, (2, 2)).of(node)
    joint = [chosen for chosen in offered if chosen[0].is_joint]
    assert joint
    assert len(offered) > len(joint)
    assert not [chosen for chosen in Offers(analysis, (2, 4)).of(node) if chosen[0].is_joint]
    assert set(Offers(analysis, (2, 2), TensorScheme.SQUARE).of(node)) <= set(joint)


@pytest.mark.parametrize(
    ("scheme", "ranks", "tp", "message"),
    [
        ("2d", 8, 8, "2d lays the tensor devices of a stage on q x q axes.*tp=8 cannot.*of 8 devices 4$"),
        ("3d", 4, 4, "on q x q x q axes.*with other numbers of devices 8, 27$"),
        ("1d", 4, "2x2", "1d lays .* on p axes, which tp=2x2 cannot be.*2, 4$"),
        ("sp", 4, 1, "tp=1 cannot be"),
        ("2.5d", 16, 4, "on q x q x d axes.*of 16 devices 8, 16$"),
        ("4d", 4, None, "tensor_scheme is one of auto, 1d, sp, 2d, 2.5d, 3d, not '4d'"),
    ],
)
def test_degrees_that_a_scheme_is_not_for(scheme: str, ranks: int, tp: int | str | None, message: str) -> None:
    analysis = uneven()
    with pytest.raises(PlanError, match=message):
        make_plan(analysis.program, ideal(ranks), analysis=analysis, tp=tp, tensor_scheme=scheme)

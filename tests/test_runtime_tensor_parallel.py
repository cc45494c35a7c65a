"""A column and a row split on a tensor axis beside a data axis; random numbers on shards; counted traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.runtime import Mesh, ParallelModule
from autopart.runtime.manifest import InputSpec, Manifest, OutputSpec, ParameterSpec, StageSpec
from autopart.runtime.structure import flatten
from autopart.runtime.traffic import Count
from launch import launch

BATCH, WIDTH, HIDDEN = 8, 6, 8


class Block(nn.Module):
    """The loss is a mean over valid targets, whose number is a total of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.unused = nn.Parameter(torch.rand(2))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(self.down(torch.tanh(self.up(x * self.scale))), target, ignore_index=-100)


STAGE = """import torch
from torch import nn
from torch.nn import functional as F

from autopart.runtime import Namespace, collectives, parameter


class Stage(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        hidden = 8 // mesh["tp"].size
        self.scale = parameter(6, dtype=torch.float64)
        self.unused = parameter(2, dtype=torch.float64)
        double = torch.float64
        self.up = Namespace(weight=parameter(hidden, 6, dtype=double), bias=parameter(hidden, dtype=double))
        self.down = Namespace(weight=parameter(6, hidden, dtype=double), bias=parameter(6, dtype=double))

    def forward(self, *, b, B, x, target, valid):
        tp = self.mesh["tp"]
        a = F.linear(x, torch.eye(6, dtype=x.dtype))
        h = collectives.sum_gradients(a, tp) * self.scale
        h = torch.tanh(F.linear(h, self.up.weight, self.up.bias))
        y = collectives.all_reduce(F.linear(h, self.down.weight), tp) + self.down.bias
        return (F.cross_entropy(y, target, ignore_index=-100, reduction="sum") / valid,)
"""
TOTALS = """def totals(*, b, B, target):
    assert len(target) == b == B
    return ((target != -100).sum(),)
"""


def emit_block(directory: Path, dp: int, tp: int, microbatches: int) -> None:
    (directory / "stage_0.py").write_text(STAGE)
    (directory / "totals.py").write_text(TOTALS)
    parameters = tuple(
        ParameterSpec(name, shape, "float64", (0,), (placement,))
        for name, shape, placement in [
            ("scale", (WIDTH,), "B"),
            ("unused", (2,), "R"),
            ("up.weight", (HIDDEN, WIDTH), "S0"),
            ("up.bias", (HIDDEN,), "S0"),
            ("down.weight", (WIDTH, HIDDEN), "S1"),
            ("down.bias", (WIDTH,), "R"),
        ]
    )
    mesh = (("dp", dp), ("tp", tp))
    Manifest(
        fingerprint="by hand",
        world_size=dp * tp,
        schedule="1f1b",
        microbatches=microbatches,
        stages=(
            StageSpec("stage_0.py", tuple(range(dp * tp)), mesh, ("x", "target"), (), ("valid",), (), ("output",)),
        ),
        values=(),
        inputs=(
            InputSpec("x", "tensor", ("b", WIDTH), "float64", 0),
            InputSpec("target", "tensor", ("b",), "int64", 0),
        ),
        outputs=(OutputSpec("output", 0, "sum", (), "float64"),),
        parameters=parameters,
        parameter_order=tuple(spec.name for spec in parameters),
        input_names=("x", "target"),
        loss="output",
        totals=("valid",),
        totals_inputs=("target",),
        output_structure=flatten(0.0)[1],
    ).save(directory)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(WIDTH, (BATCH,), generator=generator)
    target[[0, 1, 2, 6]] = -100  # the replicas have unequally many valid targets
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator), target


def _block() -> Block:
    torch.manual_seed(0)
    return Block().double()


def _train(directory: str, batch: str) -> dict[str, Any]:
    model = ParallelModule(directory, dict(_block().named_parameters()), batch=batch)  # type: ignore[arg-type]
    x, target = _data()
    if batch == "local":
        data = model.mesh.data
        x, target = x.chunk(data.size)[data.index], target.chunk(data.size)[data.index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    traffic = {}
    norm = torch.zeros(())
    for _ in range(3):
        model.traffic.reset()
        loss = model(x, target)
        loss.backward()
        traffic = model.traffic.counts()
        assert model.stages[0].unused.grad is None
        norm = model.clip_grad_norm_(0.1)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norm": norm, "state": model.full_state_dict(rank0_only=True), "traffic": traffic}


def _expected() -> dict[str, Any]:
    model = _block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = model(*_data())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norm": norm, "state": model.state_dict()}


def test_equals_the_plain_model(tmp_path: Path) -> None:
    expected = _expected()
    for index, (dp, tp, batch) in enumerate([(1, 2, "global"), (2, 1, "local"), (2, 2, "global"), (2, 2, "local")]):
        directory = tmp_path / str(index)
        directory.mkdir()
        emit_block(directory, dp, tp, 2)
        ranks = launch(_train, dp * tp, str(directory), batch)
        for rank, result in enumerate(ranks):
            torch.testing.assert_close(result["losses"], expected["losses"], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(result["norm"], expected["norm"], rtol=1e-9, atol=1e-12)
            assert (result["state"] == {}) == (rank > 0)
        for name, tensor in expected["state"].items():
            torch.testing.assert_close(ranks[0]["state"][name], tensor, rtol=1e-9, atol=1e-12)


def test_traffic_is_what_the_plan_implies(tmp_path: Path) -> None:
    emit_block(tmp_path, 2, 2, 2)
    samples = BATCH // 4
    gradients = 8 * (WIDTH + (HIDDEN * WIDTH + HIDDEN) // 2 + WIDTH * HIDDEN // 2 + WIDTH)
    for result in launch(_train, 4, str(tmp_path), "global"):
        assert result["traffic"] == {
            ("all_reduce", "tp", "forward"): Count(2, 2 * samples * WIDTH * 8),
            # The input needs no gradient, so autograd never asks for it: no backward traffic on tp.
            ("all_reduce", "dp", "update"): Count(2, gradients),  # two buckets, one of partial gradients
            ("all_reduce", "dp", "step"): Count(1, 8),  # the loss
            ("all_reduce", "tp", "update"): Count(1, 8 * WIDTH),  # the partial gradient of scale
        }


def _draw(directory: str) -> list[Any]:
    mesh = Mesh(Manifest.load(Path(directory)), seed=5)
    before = torch.get_rng_state()
    draws = []
    for step, microbatch, path, over in [
        (0, 0, "a", ("dp", "tp")),
        (0, 0, "a", ("dp",)),
        (0, 0, "a", ()),
        (1, 0, "a", ()),
        (0, 1, "a", ()),
        (0, 0, "b", ()),
    ]:
        mesh.step, mesh.microbatch = step, microbatch
        with mesh.random(path, 0, over):
            draws.append(torch.rand(3).tolist())
    assert torch.equal(before, torch.get_rng_state())
    with mesh.random("a", 0, (), training=False):
        pass
    return [mesh["dp"].index, mesh["tp"].index, *draws]


def test_random_numbers_follow_the_shards(tmp_path: Path) -> None:
    emit_block(tmp_path, 2, 2, 2)
    ranks = launch(_draw, 4, str(tmp_path))
    assert [r[:2] for r in ranks] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert len({str(r[2]) for r in ranks}) == 4
    assert ranks[0][3] == ranks[1][3] != ranks[2][3] == ranks[3][3]
    for column in range(4, 8):
        assert len({str(r[column]) for r in ranks}) == 1
    assert len({str(draw) for draw in ranks[0][4:]}) == 4


def test_one_process_draws_like_the_original(tmp_path: Path) -> None:
    emit_block(tmp_path, 1, 1, 1)
    manifest = Manifest.load(tmp_path)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with Mesh(manifest).random("a", 0, ("dp",)):
        assert torch.equal(torch.rand(3), expected)
    mesh = Mesh(dataclasses.replace(manifest, microbatches=2), seed=1)
    with mesh.random("a", 0, ("dp",)):
        first = torch.rand(3)
    with mesh.random("a", 0, ("dp",)):
        assert torch.equal(torch.rand(3), first)

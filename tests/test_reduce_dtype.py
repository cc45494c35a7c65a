"""Gradients summed over ranks in another type than their own: equal but for its rounding, and counted as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.realize import realize
from autopart.runtime.errors import CaptureError, PlanError
from launch import launch

STEPS = 2
CASES: dict[str, dict[str, Any]] = {
    **{f"zero-{level}": {"dp": 2, "zero": level, "microbatches": 2} for level in (0, 1, 2, 3)},
    "tied": {"pp": 2, "microbatches": 2},
    "tensor": {"tp": 2, "microbatches": 1},
}


class Words(nn.Module):
    """The output layer is tied to the embedding; the norm's gradients are partial where its rows are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.one, self.two, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.two(torch.tanh(self.one(self.norm(x))))
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), ids.roll(1, 1).flatten())


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return Words().to(dtype)


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_parallel(folder: str, dtype: torch.dtype, sums: tuple[str, ...], names: list[str]) -> dict[str, Any]:
    """Losses, bytes summed, and the plan's collectives of a step, by case and type of sums."""
    found = {}
    for name in names:
        for reduce_dtype in sums:
            place = Path(folder) / f"{name}-{reduce_dtype}"
            model: Any = autopart.parallelize(
                build(dtype), verbose=False, directory=place, reduce_dtype=reduce_dtype, **CASES[name]
            )
            losses = train(model)
            counts: dict[str, int] = {}
            for (operation, _, phase), count in model.parallel.traffic.counts().items():
                if phase == "update" or (phase == "backward" and operation == "reduce_scatter" and "zero" in name):
                    counts[f"{phase} {operation}"] = counts.get(f"{phase} {operation}", 0) + count.bytes // STEPS
            own = model.parallel.mesh.stages[0]
            stage = autopart.Plan.load(place / "plan.json").stages[own]
            planned = {f"update {key}": count["bytes"] for key, count in stage.step_collectives.items()}
            scattered = stage.collectives.get("reduce_scatter")
            if scattered and "zero" in name:
                planned["backward reduce_scatter"] = scattered["bytes"] * model.parallel.manifest.microbatches
            found[f"{name} {reduce_dtype}"] = losses, counts, planned
    return found


@pytest.mark.parametrize(
    "names", [["zero-0", "tied"], pytest.param(["zero-1", "zero-2", "zero-3", "tensor"], marks=pytest.mark.slow)]
)
def test_sums_in_a_narrower_type_are_sent_and_planned_as_such(names: list[str], tmp_path: Path) -> None:
    expected = train(build(torch.float64))
    for found in launch(in_parallel, 2, str(tmp_path), torch.float64, ("", "float32"), names, timeout=300.0):
        for name in names:
            losses, counts, planned = found[f"{name} float32"]
            assert losses == pytest.approx(expected, rel=1e-6)
            assert counts == planned
            for key, size in found[f"{name} "][1].items():
                if key.endswith("all_gather"):
                    assert counts[key] == size  # weights stay as they are
                elif name == "tied":
                    assert 2 * (counts[key] - 4) == size - 4  # the message of whose gradients there are is as it was
                else:
                    assert 2 * counts[key] == size
        own, narrow = (found[f"{names[0]} {dtype}"][0] for dtype in ("", "float32"))
        assert own == pytest.approx(expected, rel=1e-12) != narrow


def test_narrow_gradients_are_summed_in_a_wider_type(tmp_path: Path) -> None:
    names = ["zero-3"]
    for found in launch(in_parallel, 2, str(tmp_path), torch.bfloat16, ("", "float32"), names):
        for name in names:
            losses, counts, planned = found[f"{name} float32"]
            assert losses == pytest.approx(found[f"{name} "][0], rel=0.05)
            assert counts == planned
            sums = {key: size for key, size in counts.items() if not key.endswith("all_gather")}
            assert sums == {key: 2 * size for key, size in found[f"{name} "][1].items() if key in sums}


def test_it_is_priced() -> None:
    ids = torch.randint(16, (4, 6))
    cluster = autopart.Cluster.parse("2xH100")
    ends = []
    for reduce_dtype in ("bfloat16", "", "float64"):
        program = autopart.capture(build(torch.float32), (ids,), reduce_dtype=reduce_dtype, check_eval=False)
        plan = autopart.make_plan(program, cluster, dp=2, microbatches=1)
        ends.append((plan.stages[0].step_end_s, plan.stages[0].step_collectives["all_reduce"]["bytes"]))
    assert ends == sorted(ends) and len({seconds for seconds, _ in ends}) == 3
    with pytest.raises(CaptureError, match="float32, bfloat16, float64"):
        autopart.capture(build(torch.float32), (ids,), reduce_dtype="float16")


def test_a_plan_belongs_to_its_type_of_sums() -> None:
    ids = torch.randint(16, (4, 6))
    own, narrow = (
        autopart.capture(build(torch.float32), (ids,), reduce_dtype=sums, check_eval=False) for sums in ("", "bfloat16")
    )
    assert own.fingerprint == narrow.fingerprint_under("") != narrow.fingerprint
    plan = autopart.make_plan(own, autopart.Cluster.local(1))  # as one of before the fingerprint knew of sums
    with pytest.raises(PlanError, match=r"added up in their own types .*in bfloat16.*reduce_dtype=''"):
        realize(narrow, plan)
    with pytest.raises(PlanError, match=r"added up in bfloat16 .*reduce_dtype='bfloat16'"):
        realize(own, autopart.make_plan(narrow, autopart.Cluster.local(1)))

"""Batches padded to their longest: a program for each length, with the parameters of all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.precision import eager_in_float64, float64_throughout
from autopart.runtime import checkpoint
from autopart.runtime.errors import BatchError, CheckpointError, InputError, PlanError
from autopart.runtime.inputs import BatchMode
from families import family
from launch import launch

LENGTHS = [6, 5, 8, 5]
FEW = [6, 5]


class Words(nn.Module):
    """Learned positions, causal attention with padding, a tied output, ragged labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.norm = nn.Embedding(16, 8), nn.Embedding(12, 8), nn.LayerNorm(8)
        self.qkv, self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        samples, length = ids.shape
        x = self.embed(ids) + self.positions(torch.arange(length))
        q, k, v = (t.view(samples, length, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, None, :]
        found = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        logits = self.out(x + self.mix(found.transpose(1, 2).reshape(samples, length, 8)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def batch(length: int, samples: int = 4) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(length)
    ids = torch.randint(16, (samples, length), generator=random)
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (samples, 1), generator=random)
    return {"ids": ids, "mask": mask, "labels": ids.roll(-1, 1).masked_fill(~mask, -100)}


def train(model: Any, lengths: list[int]) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """Losses, the state after the steps, and the logits in evaluation of a length that training has and one it has not.

    One step accumulates two lengths; the last batch is smaller.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, length in enumerate(lengths):
        loss = model(**batch(length, 2 if length == lengths[-1] and step else 4))["loss"]
        loss.backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict()
    model.eval()
    with torch.no_grad():
        logits = [model(**batch(length))["logits"] for length in (lengths[0], lengths[1])]
    return losses, {name: tensor.clone() for name, tensor in state.items()}, logits


def in_parallel(plans: list[dict[str, Any]], lengths: list[int]) -> list[Any]:
    found = []
    for limits in plans:
        model: Any = autopart.parallelize(build(), verbose=False, variants=1, **limits)
        found.append((*train(model, lengths), model.parallel.variants.made))
    return found


@pytest.mark.parametrize(
    ("processes", "plans", "lengths"),
    [
        (2, [{"pp": 2, "microbatches": 2}], FEW),
        (2, [{"tp": 2}], FEW),
        pytest.param(2, [{"pp": 2, "microbatches": 2}, {"tp": 2}], LENGTHS, marks=pytest.mark.slow),
        pytest.param(
            2, [{"dp": 2, "zero": level, "microbatches": 2} for level in range(4)], LENGTHS, marks=pytest.mark.slow
        ),
        pytest.param(4, [{"pp": 2, "tp": 2, "microbatches": 2}, {"pp": 2, "dp": 2}], LENGTHS, marks=pytest.mark.slow),
    ],
)
def test_every_length_makes_the_step_of_one_process(
    processes: int, plans: list[dict[str, Any]], lengths: list[int]
) -> None:
    losses, state, logits = train(build(), lengths)
    for ranks in launch(in_parallel, processes, plans, lengths):
        for found, weights, outputs, made in ranks:
            assert made == len(set(lengths)) - 1
            assert found == pytest.approx(losses, rel=1e-9)
            for name, tensor in state.items():
                torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)
            for ours, theirs in zip(outputs, logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def family_batch(name: str, step: int, length: int) -> dict[str, Tensor]:
    """Padded to its longest; T5's source and target have lengths of their own."""
    cut = {"input_ids": length, "attention_mask": length, "labels": length - (name == "t5" and length > 7)}
    return {key: tensor[:, : cut[key]].roll(step, 0) for key, tensor in family(name).inputs(4).items()}


def train_family(name: str, limits: dict[str, Any] | None) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """Losses of six steps, the gradients' norms of each over all ranks, and the state after them."""
    model: Any = family(name).build()
    with eager_in_float64(model) if limits is None else float64_throughout():
        model = model if limits is None else autopart.parallelize(model, verbose=False, **limits)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        losses, norms = [], []
        for step, length in enumerate((12, 9, 8, 11, 9, 12)):
            loss = model(**family_batch(name, step, length)).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    return losses, norms, state


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize(
    "limits",
    [
        {"pp": 2, "dp": 1, "tp": 1, "microbatches": 2},
        {"pp": 1, "dp": 1, "tp": 2},
        {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2},
        {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2},
    ],
    ids=lambda limits: "x".join(f"{key}{limits[key]}" for key in ("pp", "dp", "tp") if limits[key] > 1),
)
def test_families_with_lengths_that_change_every_step(name: str, limits: dict[str, Any]) -> None:
    losses, norms, state = train_family(name, None)
    ranks = limits["pp"] * limits["dp"] * limits["tp"]
    for found, lengths, weights in launch(train_family, ranks, name, limits, timeout=1500.0):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(lengths, norms, rtol=1e-9, atol=1e-12)
        for key, tensor in state.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-9, atol=1e-9 * float(tensor.abs().max()))


class Rows(nn.Module):
    """Cheap to compile: two layers on every row; from 9 rows on it computes otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) if x.size(1) < 9 else torch.sin(self.first(x))
        return self.second(x).square().mean()


def rows(length: int, samples: int = 4) -> Tensor:
    return torch.arange(samples * length * 4.0).reshape(samples, length, 4).sin()


def raised(model: nn.Module, x: Tensor) -> str:
    with pytest.raises((BatchError, InputError, PlanError)) as caught:
        model(x)
    return str(caught.value)


def disagreeing() -> list[str]:
    """What each rank reads where lengths differ between ranks, and that all go on after it."""
    rank = torch.distributed.get_rank()
    found = []
    modes: tuple[BatchMode, ...] = ("global", "local")
    for mode in modes:
        model = autopart.parallelize(Rows(), verbose=False, dp=2, batch=mode, microbatches=1)
        found.append(raised(model, rows(5 + rank)))
        model(rows(5)).backward()
    found.append(raised(model, rows(10)))
    model(rows(6)).backward()
    return found


def test_ranks_that_disagree_all_raise() -> None:
    for whole, local, failed in launch(disagreeing, 2):
        assert "rank 0 with x [4, 5, 4], rank 1 with x [4, 6, 4]; every rank has to pass the same batch" in whole
        assert "pad to the longest of all replicas" in local
        assert "x [b, 10, 4] instead of [b, 5, 4]: the model computes by other ops there (:sin where :tanh" in failed


def test_the_folder_that_was_asked_for_is_the_planned_programs(tmp_path: Path, capsys: Any) -> None:
    model: Any = autopart.parallelize(Rows(), directory=tmp_path / "program", variants=1)
    state = torch.get_rng_state()
    tokens = [model(rows(length)).item() for length in (5, 6, 7, 6)]
    assert torch.equal(torch.get_rng_state(), state), "only rank 0 captures"
    assert len(tokens) == 4 and len(list(tmp_path.glob("program-sizes-*/manifest.json"))) == 2
    told = capsys.readouterr().err
    assert "compiled for x [b, 6, 4] instead of [b, 5, 4] in" in told
    assert told.count("the last 1 are kept") == 1
    assert model.parallel.manifest.inputs[0].shape == ("b", 5, 4)


def test_a_checkpoint_goes_on_with_another_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, loaded, other = (autopart.parallelize(Rows(), verbose=False) for _ in range(3))
    saved(rows(5))
    checkpoint.save(tmp_path, saved)
    loaded(rows(7))
    checkpoint.load(tmp_path, loaded)
    for ours, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    other(rows(10))
    with pytest.raises(CheckpointError, match="another program"):
        checkpoint.load(tmp_path, other)


class Tables(nn.Module):
    """Adds learned and given positions, and weighs them, by what leaves no slice where sequences have all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.positions, self.late = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(1, 6, 8))
        self.register_buffer("given", torch.randn(1, 6, 8))
        self.given: Tensor

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        x = x + self.positions[:length]
        x = torch.tanh(self.first(x)) + self.given[:, :length]
        x = (x * self.late[:, :length, :])[:, :5]
        return self.second(x).square().mean()


def with_tables(limits: dict[str, Any] | None, lengths: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model: Any = Tables().double()
    if limits is not None:
        model = autopart.parallelize(model, verbose=False, microbatches=1, **limits)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for length in lengths:
        loss = model(rows(length).double())
        loss.backward()
        losses += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("limits", [{"pp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("lengths", [[6, 4, 5], [4, 6, 5]], ids=str)
def test_tables_that_are_cut_to_their_full_length(limits: dict[str, Any], lengths: list[int]) -> None:
    losses, state = with_tables(None, lengths)
    for found, weights in launch(with_tables, 2, {"pp": 1, "dp": 1, "tp": 1, **limits}, lengths):
        assert found == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(weights, dict(state), rtol=1e-9, atol=1e-12)


class Fixed(nn.Module):
    """Its graph is of one number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.map(x)
        return torch.nn.functional.cross_entropy(x @ x.T, torch.tensor(list(range(x.shape[0]))))


def test_a_batch_that_the_graph_fixes_may_be_smaller() -> None:
    torch.manual_seed(0)
    plain = Fixed()
    model = autopart.parallelize(copy.deepcopy(plain), verbose=False)
    for samples in (4, 3, 1, 4):
        x = rows(1, samples)[:, 0]
        assert model(x).item() == pytest.approx(plain(x).item(), rel=1e-5)


def test_no_other_sizes_while_a_batch_is_in_flight() -> None:
    model = autopart.parallelize(Rows(), verbose=False, schedule="2bw", microbatches=1)
    model(rows(5))
    with pytest.raises(InputError, match="pad what is shorter"):
        model(rows(6))

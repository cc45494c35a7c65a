"""Checkpoints: saved under one plan, loaded under another and into the plain model; whole or absent."""

from __future__ import annotations

import functools
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

import autopart
from autopart.cli import main
from autopart.precision import eager_in_float64, float64_throughout
from autopart.runtime import checkpoint, checkpoint_folder
from autopart.runtime.agreement import checkpoint_group
from autopart.runtime.errors import CheckpointError
from autopart.runtime.holding import holding_of
from autopart.runtime.placement import Placement, take_shard, take_share
from autopart.runtime.shares import Piece, boxes_of
from autopart.runtime.stored_shares import Folder, write_pieces
from emitted import WIDTH, data, plain
from families import family
from launch import launch

SMALL, WHOLE = "gpt2-1", "gpt2"  # of one layer and of four
STEPS, HALF = 10, 5


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Two groups, by number of dims; made before the first call."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=5e-3)


def batch_of(step: int) -> dict[str, Tensor]:
    batch = family(SMALL).inputs(4)
    ids = (batch["input_ids"] * 7 + step) % 96
    return {**batch, "input_ids": ids, "labels": ids}


def steps(model: nn.Module, optimizer: Any, scheduler: Any, start: int, end: int) -> None:
    for step in range(start, end):
        model(**batch_of(step)).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def made(name: str, limits: dict[str, Any] | None) -> tuple[nn.Module, Any, Any]:
    """A model (parallel under these limits, or plain), its optimizer and scheduler."""
    model = family(name).build()
    if limits is not None:
        model = autopart.parallelize(model, verbose=False, **limits)
    optimizer = optimizer_of(model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def found_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """This rank's shares by name, with the boxes that they are of the whole."""
    holding = holding_of(model)
    state = {}
    for name, entry in holding.entries.items():
        if entry.tensor is None:
            continue
        tensors = {"": entry.tensor, **optimizer.state.get(entry.tensor, {})}
        for key, tensor in tensors.items():
            value = tensor.detach().clone()
            state[f"{name}:{key}"] = (entry.boxes, value) if value.dim() else ((), value)
    return state


def run(
    name: str, folder: str, limits: dict[str, Any] | None, start: int, end: int, save: bool, asynchronous: bool = False
) -> dict[str, Any]:
    """From the start, or from the latest checkpoint, to ``end``; saves there."""
    model, optimizer, scheduler = made(name, limits)
    with eager_in_float64(model) if limits is None else float64_throughout():
        if start:
            loaded = checkpoint.load(folder, model, optimizer, scheduler)
            assert (loaded.step, loaded.extra) == (start, {"position": [start, "shard"]})
        steps(model, optimizer, scheduler, start, end)
        if save:
            extra = {"position": [end, "shard"]}
            saving = checkpoint.save(
                folder, model, optimizer, scheduler, step=end, extra=extra, asynchronous=asynchronous
            )
            if asynchronous:
                for parameter in model.parameters():
                    parameter.data.zero_()  # what was staged is the model's no more
                saving.wait()
                return {}
        return found_state(model, optimizer)


@functools.cache
def uninterrupted(name: str) -> dict[int, dict[str, Tensor]]:
    """The plain model's state."""
    model, optimizer, scheduler = made(name, None)
    states = {}
    with eager_in_float64(model):
        for end in (HALF, STEPS):
            steps(model, optimizer, scheduler, end - HALF, end)
            states[end] = {name: value for name, (_, value) in found_state(model, optimizer).items()}
    return states


def compare(found: dict[str, Any], expected: dict[str, Tensor], whole: bool = False) -> None:
    assert found
    assert not whole or found.keys() == expected.keys()
    for name, (boxes, value) in found.items():
        if not boxes:
            assert value == expected[name]
        for box in boxes:
            region = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
            torch.testing.assert_close(box.of(value), expected[name][region], rtol=1e-9, atol=1e-10)


PP2_TP2 = {"pp": 2, "tp": 2, "dp": 1, "microbatches": 2}
DP2_PP2 = {"pp": 2, "tp": 1, "dp": 2, "microbatches": 2}
DP2 = {"dp": 2, "tp": 1, "pp": 1, "microbatches": 1}
CASES = [
    (SMALL, 4, PP2_TP2, 2, DP2),
    pytest.param(WHOLE, 4, PP2_TP2, 2, DP2, marks=pytest.mark.slow),
    pytest.param(WHOLE, 4, DP2_PP2, 2, {"tp": 2, "dp": 1, "pp": 1, "microbatches": 1}, marks=pytest.mark.slow),
    pytest.param(
        *(WHOLE, 2, {"tp": 2, "dp": 1, "pp": 1, "microbatches": 1}),
        *(2, {"pp": 2, "tp": 1, "dp": 1, "microbatches": 2}),
        marks=pytest.mark.slow,
    ),
    *(
        pytest.param(WHOLE, 4, first, 2, then, marks=pytest.mark.slow)
        for first, then in (
            ({"dp": 4, "zero": 3, "microbatches": 1}, {"tp": 2, "microbatches": 1}),
            ({"dp": 2, "tp": 2, "zero": 1, "microbatches": 1}, {"pp": 2, "microbatches": 2}),
            ({"pp": 2, "dp": 2, "zero": 2, "microbatches": 2}, {"dp": 2, "zero": 3, "microbatches": 1}),
            ({"tp": (2, 2), "microbatches": 1}, {"dp": 2, "zero": 1, "microbatches": 2}),
            ({"pp": 4, "microbatches": 2}, {"dp": 2, "zero": 2, "microbatches": 2}),
        )
    ),
]


@pytest.mark.parametrize(("name", "ranks", "first", "then_ranks", "then"), CASES)
def test_moves_between_plans(
    tmp_path: Path,
    name: str,
    ranks: int,
    first: dict[str, Any],
    then_ranks: int,
    then: dict[str, Any],
) -> None:
    folder, expected = str(tmp_path), uninterrupted(name)
    for found in launch(run, ranks, name, folder, first, 0, HALF, True, timeout=300):
        compare(found, expected[HALF])
    # The plain model takes over from the first plan as well as from the second.
    compare(run(name, folder, None, HALF, STEPS, False), expected[STEPS], whole=True)
    for found in launch(run, then_ranks, name, folder, then, HALF, STEPS, True, timeout=300):
        compare(found, expected[STEPS])
    compare(run(name, folder, None, STEPS, STEPS, False), expected[STEPS], whole=True)


# --- With small programs written by hand: two stages and a weight tied between them ---


def small_step(model: nn.Module, optimizer: Any, step: int) -> None:
    x, target = data(8, WIDTH, seed=step)
    model(x, target=target)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def with_dropout(folder: str, limits: dict[str, Any]) -> list[list[float]]:
    """Losses of four steps, and of the last two again after loading what was saved between."""

    def start() -> tuple[nn.Module, Any]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        model = autopart.parallelize(net, loss_fn=nn.MSELoss(), verbose=False, **limits)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = model(torch.ones(8, 6, dtype=torch.float64), targets=torch.ones(8, 3, dtype=torch.float64)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = start()
    train(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    first = train(model, optimizer, 2)
    model, optimizer = start()
    assert checkpoint.load(folder, model, optimizer).step == 2
    return [first, train(model, optimizer, 2)]


@pytest.mark.parametrize(
    ("ranks", "limits"),
    [(1, {}), pytest.param(2, {"dp": 2}, marks=pytest.mark.slow), (2, {"pp": 2, "microbatches": 2})],
)
def test_dropout_goes_on(tmp_path: Path, ranks: int, limits: dict[str, Any]) -> None:
    for first, again in launch(with_dropout, ranks, str(tmp_path), limits):
        assert first == again


# --- Boxes, errors, what is loaded before the first call, the command ---


@pytest.mark.parametrize(
    "cuts", [["S1/3"], ["S0", "S0/2"], ["S1/6", "S1/3"], ["S1", "S1/6"], ["R", "S0/2"], ["B", "S1"]]
)
def test_boxes_are_what_a_share_takes(cuts: list[str]) -> None:
    whole = torch.arange(8 * 24).reshape(8, 24)
    for first, second in itertools.product(range(2), range(2)):
        axes = [(Placement.parse(text), index, 2) for text, index in zip(cuts, (first, second), strict=False)]
        placements, indices, sizes = zip(*axes, strict=True)
        share = take_share(whole, placements, sizes, indices)
        boxes = boxes_of(whole.shape, axes)
        assert sum(box.of(share).numel() for box in boxes) == share.numel()
        for box in boxes:
            region = tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
            assert torch.equal(box.of(share), whole[region])


def divided_anew(folder: str, first: str, then: str) -> None:
    """Each rank writes its share in one division and reads it in another, and rank 1 reads all."""
    whole, rank = torch.arange(8 * 24.0).reshape(8, 24), torch.distributed.get_rank()

    def piece(text: str) -> Piece:
        cut = Placement.parse(text), rank, 2
        return Piece((8, 24), boxes_of((8, 24), [cut]), take_shard(whole, *cut).clone())

    write_pieces(Path(folder), {"x": piece(first)}, checkpoint_group())
    mine = piece(then)
    expected = mine.tensor.clone()
    mine.tensor.zero_()
    Folder(Path(folder)).read({"x": mine})
    assert torch.equal(mine.tensor, expected)
    if rank == 1:
        assert torch.equal(Folder(Path(folder)).tensor("x"), whole)
    torch.distributed.barrier()


@pytest.mark.parametrize(("first", "then"), [("S1/3", "S0"), ("S0", "S1/3"), ("S1/3", "S1/6"), ("S1", "S1/3")])
def test_a_fused_projection_is_divided_anew(tmp_path: Path, first: str, then: str) -> None:
    launch(divided_anew, 2, str(tmp_path / "pieces"), first, then)


def saved(folder: Path, model: nn.Module, **options: Any) -> nn.Module:
    checkpoint.save(folder, model, **options)
    return model


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        checkpoint.load(tmp_path, nn.Linear(2, 3))
    model = saved(tmp_path, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000000"
    wrong = [
        (nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(3)), r"0.weight is \[3, 2\] in the checkpoint and \[4, 2\]"),
        (nn.Sequential(nn.Linear(2, 3)), "unexpected 1.bias, 1.num_batches_tracked"),
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), "missing 2.weight, 2.bias"),
        (
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double(),
            "torch.float32 in the checkpoint and",
        ),
    ]
    for other, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(tmp_path, other)
    wider = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    checkpoint.load(tmp_path, wider, strict=False)
    assert all(torch.equal(wider.state_dict()[name], tensor) for name, tensor in before.items())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="saved without a scheduler"):
        checkpoint.load(tmp_path, model, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1))
    with pytest.raises(CheckpointError, match=r"a parameter of the shape .* that the model does not have"):
        checkpoint.save(tmp_path, model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match="extra cannot be saved"):
        checkpoint.save(tmp_path, model, extra=object())
    (tmp_path / "step-00000000" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match="no readable checkpoint in"):
        checkpoint.load(tmp_path, model)


def test_what_fails_in_the_background_is_raised_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = saved(tmp_path, nn.Linear(2, 3), step=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "_write", full)
        saving = checkpoint.save(tmp_path, model, step=2, asynchronous=True)
        while not saving.done:
            pass
    with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*No space left"):
        checkpoint.save(tmp_path, model, step=3)
    assert checkpoint.load(tmp_path, model).step == 1
    assert saved(tmp_path, model, step=3) and checkpoint.load(tmp_path, model).step == 3


def test_several_optimizers_and_random_numbers_go_on(tmp_path: Path) -> None:
    def draw(steps: int, model: nn.Sequential, optimizers: list[Any]) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = nn.functional.dropout(model(torch.randn(4, 2)), 0.5).square().sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, random.random()]

    def make() -> tuple[nn.Sequential, list[Any]]:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        return model, [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), 0.1, 0.9)]

    model, optimizers = make()
    draw(2, model, optimizers)
    checkpoint.save(tmp_path, model, optimizers, step=2)
    expected = draw(3, model, optimizers)
    torch.manual_seed(17)
    model, optimizers = make()
    checkpoint.load(tmp_path, model, optimizers)
    assert draw(3, model, optimizers) == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_it(tmp_path: Path) -> None:
    model, other = saved(tmp_path, plain(tied=True), step=1), plain(tied=True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = {"model": {name: tensor for name, tensor in other.state_dict().items() if name != "third.weight"}}
    load(state, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = plain(tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    small_step(model, optimizer, 0)
    checkpoint.save(tmp_path, model, optimizer, step=7)
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 7, program the plain model" in shown and "first.weight, third.weight" in shown
    assert main(["checkpoint", "show", "--json", str(tmp_path)]) == 0
    tensor = json.loads(capsys.readouterr().out)["tensors"][1]
    assert tensor["name"] == "first.weight" and tensor["bytes"] == 8 * WIDTH * WIDTH
    assert tensor["optimizer_state"] == ["exp_avg", "exp_avg_sq", "step"]
    for name in ("whole.safetensors", "whole.pt"):
        assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / name)]) == 0
        path = tmp_path / name
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, found[key]) for key, tensor in model.state_dict().items())
    assert main(["checkpoint", "convert", str(tmp_path), str(tmp_path / "whole.bin")]) == 2
    assert main(["checkpoint", "show", str(tmp_path / "nothing")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert not list(tmp_path.glob(".whole*")), "nothing is left beside them"

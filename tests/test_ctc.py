"""CTC losses: captured as an op for each sample, equal to torch's, and trained in parallel as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopart.verify
from autopart.ctc_capture import RowsOfTargets
from autopart.runtime import ctc
from autopart.runtime.errors import CaptureError, InputError
from autopart.tracing import capture
from clusters import ideal
from launch import run_kept_job

TIMES, SAMPLES, CLASSES = 9, 8, 5


def transcripts() -> Tensor:
    """Rows with -100 where nothing is said, in the middle too, and one that is empty."""
    labels = torch.randint(1, CLASSES, (SAMPLES, 4), generator=torch.Generator().manual_seed(0))
    labels[1, 2:] = labels[2, 1] = labels[3, :] = -100
    return labels


def scores() -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(TIMES, SAMPLES, CLASSES, generator=random, dtype=torch.float64).log_softmax(-1).requires_grad_()


def loss_of(log_probs: Tensor, labels: Tensor, form: str, **more: Any) -> Tensor:
    valid = labels >= 0
    times = torch.full((log_probs.shape[1],), TIMES)
    lengths = valid.sum(-1)
    if form == "padded":
        targets = labels.gather(1, (~valid).int().argsort(dim=1, stable=True)).clamp_min(0)
    elif form == "index":
        targets = labels[valid]
    else:
        targets = labels.masked_select(valid)
    return functional.ctc_loss(log_probs, targets, times, lengths, **more)


@pytest.mark.parametrize("form", ["select", "index", "padded"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torch_s_loss(form: str, reduction: str) -> None:
    found = []
    for mode in (None, RowsOfTargets()):
        log_probs = scores()
        with torch.no_grad():
            log_probs[:, 5, 1:] = -torch.inf  # which cannot say its transcript
        if mode is None:
            loss = loss_of(log_probs, transcripts(), form, reduction=reduction, zero_infinity=True)
        else:
            with mode:
                loss = loss_of(log_probs, transcripts(), form, reduction=reduction, zero_infinity=True)
        loss.sum().backward()
        assert log_probs.grad is not None
        found.append((loss.detach(), log_probs.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_what_cannot_be_told_apart_is_refused() -> None:
    log_probs, ones = scores(), torch.ones(SAMPLES, dtype=torch.long)
    numbers: Any = (9,) * SAMPLES, (1,) * SAMPLES
    with RowsOfTargets(), pytest.raises(CaptureError, match="give them padded"):
        functional.ctc_loss(log_probs, ones, 9 * ones, ones)
    with RowsOfTargets(), pytest.raises(CaptureError, match="lengths that are tensors"):
        functional.ctc_loss(log_probs, ones, *numbers)
    with pytest.raises(InputError, match="make them agree"):
        ctc.ctc_losses(log_probs, transcripts(), transcripts() >= 0, 9 * ones, ones, 0, False)


class Shifted(nn.Module):
    """Writes to what the list of targets was made of, or to the list, before the loss."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.head, self.written = nn.Linear(6, CLASSES), written

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels = labels.clone()
        valid = labels >= 0
        lengths = valid.sum(-1)
        targets = labels.masked_select(valid)
        {"targets": targets, "labels": labels}[self.written].clamp_(max=2)
        times = torch.full((x.shape[0],), TIMES)
        return functional.ctc_loss(self.head(x).log_softmax(-1).transpose(0, 1), targets, times, lengths)


@pytest.mark.parametrize("written", ["targets", "labels"])
def test_what_is_written_to_in_place_is_refused(written: str) -> None:
    with pytest.raises(CaptureError, match="in place"):
        capture(Shifted(written), (torch.randn(SAMPLES, TIMES, 6), transcripts()))


class Speech(nn.Module):
    """Frames, and a loss as transformers' speech models take it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if labels.max() >= CLASSES:
            raise ValueError("no such class")
        logits = self.head(self.body(x))
        log_probs = functional.log_softmax(logits, -1, dtype=torch.float32).transpose(0, 1)
        return {"loss": loss_of(log_probs, labels, "select"), "logits": logits}


@pytest.mark.parametrize(
    "limits",
    [
        {"dp": 2, "microbatches": 2},
        pytest.param({"pp": 2, "tp": 2, "dp": 1, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "pp": 1, "dp": 1}, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_process(limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    inputs = {"x": torch.randn(SAMPLES, TIMES, 6), "labels": transcripts()}
    ranks = limits.get("pp", 1) * limits.get("dp", 1) * limits.get("tp", 1)
    found = autopart.verify.verify(Speech(), (), inputs, cluster=ideal(ranks), limits={"recompute": "none", **limits})
    assert found.equal, found

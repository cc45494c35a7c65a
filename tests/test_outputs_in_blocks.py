"""Outputs whose samples lie inside blocks, as of models with the sequence first that put both into one dim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.runtime.inputs import Division
from autopart.runtime.manifest import OutputSpec
from autopart.runtime.mesh import Axis
from autopart.runtime.outputs import _combine, gradient_piece
from clusters import ideal
from launch import launch

TOKENS, WIDTH, BATCH, STEPS = 11, 6, 8, 5


class Language(nn.Module):
    """The sequence first; ``[steps, batch]`` becomes one dim of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(TOKENS, WIDTH),
            nn.GRU(WIDTH, WIDTH, 2),
            nn.Linear(WIDTH, TOKENS),
        )
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return F.log_softmax(self.decoder(output).view(-1, TOKENS), -1), hidden


DIMS = {"tokens": 1, "hidden": 1}


def trained(limits: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    """By truncated backpropagation through time: losses, and parameters after it. limits: None: in one process."""
    torch.manual_seed(0)
    model: Any = Language().double()
    text = torch.randint(TOKENS, (4 * STEPS + 1, BATCH))
    if limits is not None:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, batch_dims=DIMS, **limits)
    hidden = torch.zeros(2, BATCH, WIDTH, dtype=torch.float64)
    losses = []
    for start in range(0, 4 * STEPS, STEPS):
        model.zero_grad()
        output, hidden = model(text[start : start + STEPS], hidden.detach())
        loss = F.nll_loss(output, text[start + 1 : start + STEPS + 1].view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.5)
        losses.append(loss.item())
    return losses, model.state_dict()


def a_language_model(limits: dict[str, Any]) -> None:
    expected, found = trained(None), trained({"pp": 1, "dp": 1, "tp": 1, **limits})
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "limits",
    [{"dp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 4}],
    ids=lambda limits: "-".join(map(str, limits)),
)
@pytest.mark.filterwarnings("ignore:the loss is computed outside")
def test_as_in_one_process(limits: dict[str, Any]) -> None:
    launch(a_language_model, 2, limits)


@pytest.mark.parametrize("shares", [(3, 1), ()])
def test_each_sample_has_its_place(shares: tuple[int, ...]) -> None:
    """Of replicas with unlike parts, whose wholes are added up, and of one that is given all; two rows a sample."""
    spec = OutputSpec("out", 0, "cat", (3, "30b"), "float64", 1, 5)
    whole = torch.arange(3.0 * 30 * BATCH, dtype=torch.float64).view(3, 30 * BATCH)
    total = torch.zeros_like(whole)
    for replica in range(len(shares) or 1):
        division = Division(BATCH, len(shares) or 1, replica, 2, shares)
        pieces = []
        for microbatch in range(2):
            piece = gradient_piece(spec, whole, division, microbatch)
            assert piece is not None
            rows = slice(division.start(microbatch), division.start(microbatch) + division.samples)
            assert piece.equal(whole.view(3, 5, BATCH, 6)[:, :, rows].reshape(3, -1))
            pieces.append(piece)
        total += _combine(spec, pieces, Axis("dp"), division)
    assert total.equal(whole)

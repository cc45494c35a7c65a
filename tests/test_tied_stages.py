"""What stages pay for a parameter that several of them read: each converts it by itself in every microbatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.candidates import Candidates
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal

ROWS, WIDTH, BATCH = 1001, 32, 8  # rows that tensor ranks do not divide


class Tied(nn.Module):
    """An embedding that the output layer reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), ids.flatten())


def test_each_stage_gathers_a_divided_parameter() -> None:
    """An embedding that is divided by columns and gathered by both of its readers."""
    analysis = analyze(capture(Tied(), (torch.zeros(BATCH, 4, dtype=torch.long),), check_eval=False))
    candidates = Candidates(analysis, ideal(8, bandwidth=1e6), BATCH, "adamw")
    two, one = Degrees(2, 1, (4,), 2, "1f1b", "none"), Degrees(1, 2, (4,), 4, "1f1b", "none")
    choice = candidates.choose(two, tied={"embed.weight": 1e3})
    assert choice.storage["embed.weight"][0].divides
    (blocks,) = {found for node, found in candidates.readers.items() if node.meta["name"] == "embed.weight"}
    (axis,), gathered = candidates.setting(two).axes, ROWS * WIDTH * 4 * 3 / 4
    gather = gathered / axis.link.bandwidth
    (first, last), (_, together) = (
        [candidates.problem(config, choice).shapes[0].blocks[block].forward_s for block in blocks]
        for config in (two, one)
    )
    assert min(first, last) > gather > together

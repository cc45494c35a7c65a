"""Models whose code holds for some batch sizes: a graph for these, or for the given one alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopart.planner import make_plan
from autopart.runtime.errors import PlanError
from autopart.tracing import capture
from clusters import ideal
from programs import outputs_by_name, run_graph


class Halves(nn.Linear):
    """Sizes like ``(b - 4) * 5``, whose least is no whole number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden[:4].mean() - hidden[4:].mean()


def test_batch_size_above_a_fraction_is_fixed() -> None:
    model, given = Halves(5, 5), torch.randn(8, 5)
    program = capture(model, (given,))
    assert program.static_batch.startswith("the model's code asks that ") and program.batch == 8
    found = outputs_by_name(program, run_graph(program, program.graph, model, {"x": given}, 8))
    torch.testing.assert_close(found["output"], model(given))


def test_the_most_samples_where_a_bound_is_a_fraction() -> None:
    class Limited(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x)
            return hidden.mean() if hidden.numel() <= 2**24 else hidden.sum()

    program = capture(Limited(4, 5), (torch.randn(8, 4),), check_eval=False)
    assert program.static_batch == "" and program.most_samples == 2**24 // 5


class OftenContiguous(nn.Module):
    """As upsampling in diffusers does: another branch for large batches."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), times

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).repeat_interleave(self.times, 0)
        if hidden.shape[0] >= 64:
            hidden = hidden.contiguous()
        return hidden.square().mean()


@pytest.mark.parametrize(("times", "most"), [(1, 63), (3, 21)])
def test_a_graph_for_so_many_samples_at_most(times: int, most: int) -> None:
    program = capture(OftenContiguous(times), (torch.randn(8, 4),), check_eval=False)
    assert program.static_batch == "" and program.most_samples == most
    with pytest.raises(PlanError, match="at most"):
        make_plan(program, ideal(1), batch=72, microbatches=1)
    assert make_plan(program, ideal(1), batch=72).microbatches >= 72 / most

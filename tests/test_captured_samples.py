"""Which dim of an input holds samples, and models that are captured for one number of these."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_capture import Net, inputs, results
from torch import Tensor, nn

from autopart.passes.batch import split_batch
from autopart.passes.program_json import read, written
from autopart.passes.rules import RULES
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from programs import gradients, in_shares


def test_batch_of_one_example() -> None:
    model = Net()
    one, four = capture(model, (), inputs(1)), capture(model, (), inputs(4))
    assert one.batch == 1 and one.fingerprint == four.fingerprint
    torch.testing.assert_close(results(one, model, inputs(5), 5)["loss"], model(**inputs(5))["loss"])


def test_batch_dims() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return self.linear(x + shared).sum(0)

    given = {"x": torch.randn(5, 4, 3), "shared": torch.randn(5, 1, 3)}
    program = capture(TimeFirst(), (), given, batch_dims={"x": 1, "shared": None})
    assert [(spec.shape, spec.batch_dim) for spec in program.inputs] == [((5, "b", 3), 1), ((5, 1, 3), None)]
    assert program.batch == 4
    with pytest.raises(CaptureError, match="'y'"):
        capture(TimeFirst(), (), given, batch_dims={"y": 0})
    from_the_right = capture(TimeFirst(), (), given, batch_dims={"x": 1 - given["x"].dim(), "shared": None})
    assert from_the_right.inputs == program.inputs
    with pytest.raises(CaptureError, match=r"batch_dims\['x'\]: 7 is no dim of a tensor"):
        capture(TimeFirst(), (), given, batch_dims={"x": 7})
    with pytest.raises(CaptureError, match="loss_fn is a function"):
        capture(TimeFirst(), (), given, loss_fn="mse")  # type: ignore[arg-type]


class Nodes(nn.Module):
    """The first input is of all nodes, of which samples pick some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, nodes: Tensor, picked: Tensor) -> Tensor:
        found: Tensor = self.linear(nodes.reshape(6, 4))[picked]
        return found.square().mean()


def test_a_guess_of_samples_is_told_where_the_batch_is_fixed() -> None:
    given = (torch.randn(6, 4), torch.arange(3))
    guessed = r"in the first dim of 'nodes' \[6, 4\], and not in 'picked' \[3\]; batch_dims says"
    assert re.search(guessed, capture(Nodes(), given).static_batch)
    assert capture(Nodes(), given, batch_dims={"nodes": None}).static_batch == ""


def test_what_a_model_asks_of_its_batch_is_told_by_its_size() -> None:
    class Pairs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            left, right = super().forward(x).chunk(2)
            return (left - right).square().mean()

    assert "L[" not in capture(Pairs(4, 2), (torch.randn(6, 4),)).static_batch


def test_batch_size_that_the_model_fixes() -> None:
    class Fixed(Net):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(x.reshape(4, 4) + 1, labels)

    program = capture(Fixed(), (), inputs(4))
    assert program.static_batch == "the model's code holds for a batch of 4 samples only"
    split = split_batch(program, RULES)
    assert program.static_batch in split.flaw and split.graph is program.graph
    torch.testing.assert_close(results(program, Fixed(), inputs(4), 4)["logits"].shape, torch.Size((4, 3)))


class Policy(nn.Module):
    """Actions are drawn from a normal distribution whose widths are parameters, alike for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.width = nn.Linear(5, 8), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, action: Tensor) -> dict[str, Tensor]:
        drawn = torch.distributions.Normal(self.mean(x), self.width.exp())
        return {"loss": -(drawn.log_prob(action) + 0.1 * drawn.entropy()).sum(-1).mean(), "spread": drawn.entropy()}


@pytest.mark.parametrize("samples", [4, 8])
def test_an_example_with_as_many_samples_as_a_dim_has_entries(samples: int) -> None:
    """Whether the two agree is asked while ops are written anew, as of what is broadcast: no graph may remember it."""
    model = Policy().double()
    example = {"x": torch.randn(8, 5).double(), "action": torch.randn(8, 8).double()}
    program = capture(model, (), example, check_eval=False)
    split = split_batch(read(written(program)), RULES)
    assert not split.flaw and not program.static_batch
    given = {name: tensor[:samples] for name, tensor in example.items()}
    expected = model(**given)
    expected["loss"].backward()
    slopes = gradients(model)
    for proved in (split_batch(program, RULES), split):
        outputs, found = in_shares(program, proved, model, given, samples, 2)
        torch.testing.assert_close(outputs, {name: tensor.detach() for name, tensor in expected.items()})
        torch.testing.assert_close(found, slopes)

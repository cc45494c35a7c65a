"""What no trace of a model has is refused with a word on what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from programs import run_graph


class Within(nn.Module):
    def __init__(self, take: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.take = nn.Linear(4, 4), take

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.linear, x).sum()


def slope(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(linear(x).tanh().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("take", "match"),
    [
        (lambda linear, x: torch.func.vmap(linear)(x), r"vmap, in module 1 \(.*test_untraceable\.py:"),
        (lambda linear, x: linear(x) + torch.cov(x), r"(?s)aten.equal.*an op that looks at values"),
        (
            lambda linear, x: torch.distributions.Normal(linear(x), 1.0, validate_args=True).mean,
            r"(?s)satisfy the constraint.*leave validate_args out, or False",
        ),
        (lambda linear, x: linear(x + x.data), r"(?s)reads a tensor's \.data.*use \.detach"),
        (lambda linear, x: slope(linear, x.detach().requires_grad_()), r"calls autograd\.grad: no graph has"),
    ],
)
def test_what_no_graph_has_is_named(take: Callable[[nn.Module, Tensor], Tensor], match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        capture(nn.Sequential(nn.Linear(4, 4), Within(take)), (torch.randn(4, 4),), check_eval=False)


def test_compiled_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(CaptureError, match=r"module 1 is compiled by torch\.jit"):
        capture(model, (torch.randn(4, 4),), check_eval=False)


def test_lazy_modules_need_a_first_call() -> None:
    model, x = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(1)), torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r"'0.weight' has no size yet.*call the model once on a batch"):
        capture(model, (x,), check_eval=False)
    model(x)
    assert not capture(model, (x,), check_eval=False).notes


def test_distributions_are_traced_without_their_checks() -> None:
    def take(linear: nn.Module, x: Tensor) -> Tensor:
        mixture = torch.distributions.Categorical(logits=linear(x))
        parts = torch.distributions.Normal(linear(x), 1 + linear(x).square())
        return torch.distributions.MixtureSameFamily(mixture, parts).log_prob(x[:, 0])

    model, x = Within(take), torch.randn(4, 4)
    checked = torch.distributions.Distribution._validate_args
    program = capture(model, (x,), check_eval=False)
    assert torch.equal(run_graph(program, program.graph, model, {"x": x}, 4)[0], model(x))
    assert checked == torch.distributions.Distribution._validate_args

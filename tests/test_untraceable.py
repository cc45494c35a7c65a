"""What no trace of a model has is refused with a word on what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from autopart.passes.batch import split_batch
from autopart.passes.rules import RULES
from autopart.precision import float64_throughout
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from programs import gradients, in_shares, run_graph


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
        (lambda linear, x: linear(x)[: int(x.argmax())], r"a whole number is read off a tensor.*index by the tensor"),
        (
            lambda linear, x: torch.distributions.Normal(linear(x), 1.0, validate_args=True).mean,
            r"(?s)satisfy the constraint.*leave validate_args out, or False",
        ),
        (lambda linear, x: linear(x + x.data), r"(?s)reads a tensor's \.data.*use \.detach"),
        (lambda linear, x: slope(linear, x.detach().requires_grad_()), r"calls autograd\.grad \(.*: no graph has"),
        (
            lambda linear, x: torch.func.grad(lambda p: linear(p).sum())(x),
            "no graph has the transformations of torch.func",
        ),
        (
            lambda linear, x: torch.func.vmap(torch.func.grad(lambda p: linear(p).sum()))(x),
            "no graph has the transformations of torch.func",
        ),
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


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: torch.eye(4).to_sparse(), r"'input' is a sparse tensor.*indices and values"),
        (lambda: torch.eye(4).to_sparse_csr(), r"'input' is a sparse tensor"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
            r"'input' is a nested tensor.*to_padded_tensor",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]), r"'input' is a nested tensor"),
    ],
)
def test_inputs_that_are_no_arrays_are_refused(made: Callable[[], Tensor], match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        capture(nn.Linear(4, 4), (made(),), check_eval=False)


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


class Spread(nn.Module):
    """A mean and its variance, some of which are below eps."""

    def __init__(self, variances: Callable[[Tensor], Tensor | float], **options: Any) -> None:
        super().__init__()
        self.mean, self.spread, self.variances, self.options = nn.Linear(4, 3), nn.Linear(4, 3), variances, options

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        variances = self.variances(self.spread(x))
        loss = nn.functional.gaussian_nll_loss(self.mean(x), y, variances, **self.options)
        return {"loss": loss.mean()}


@pytest.mark.parametrize(
    ("variances", "options"),
    [
        (torch.relu, {"eps": 0.1}),
        (lambda found: found.square().mean(1), {"full": True}),
        (lambda found: found.exp().sum(1, keepdim=True), {"reduction": "none"}),
        (lambda found: 2.0, {}),
    ],
)
def test_gaussian_losses_are_traced_without_their_check(
    variances: Callable[[Tensor], Tensor | float], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Spread(variances, **options).double()
    given = {"x": torch.randn(6, 4).double(), "y": torch.randn(6, 3).double()}
    program = capture(model, (), given, check_eval=False)
    outputs, found = in_shares(program, split_batch(program, RULES), model, given, 6, 2)
    plain = model(**given)["loss"]
    plain.backward()
    expected = gradients(model)
    torch.testing.assert_close(outputs["loss"], plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class Weighted(nn.Module):
    """Absolute errors, of which samples weigh more or less."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"loss": l1_loss(self.mean(x), y, weight=weight)}  # type: ignore[call-arg]


@pytest.mark.parametrize("wide", [False, True])
def test_weights_of_absolute_errors_are_not_lost(wide: bool) -> None:
    """torch leaves them out of what it gives to overrides, of which each trace is one."""
    torch.manual_seed(0)
    model = Weighted().double()
    given = {"x": torch.randn(6, 4), "y": torch.randn(6, 3), "weight": torch.rand(6, 3)}
    given = {name: tensor.double() for name, tensor in given.items()}
    plain = model(**given)["loss"]
    plain.backward()
    expected = gradients(model)
    with float64_throughout() if wide else nullcontext():
        program = capture(model, (), given, check_eval=False)
        torch.testing.assert_close(model(**given)["loss"], plain)
    outputs, found = in_shares(program, split_batch(program, RULES), model, given, 6, 2)
    torch.testing.assert_close(outputs["loss"], plain)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_gaussian_loss_of_negative_variances_is_no_number() -> None:
    model, given = Spread(lambda found: found), {"x": torch.randn(6, 4), "y": torch.randn(6, 3)}
    program = capture(model, (), given, check_eval=False)
    with pytest.raises(ValueError, match="negative"):
        model(**given)
    assert run_graph(program, program.graph, model, given, 6)[0].isnan()
    with pytest.raises(CaptureError, match="var of"):
        capture(Spread(lambda found: found[:, :2]), (), given, check_eval=False)


def test_sizes_that_do_not_fit_are_refused_where_entries_are_taken_along_a_dim() -> None:
    """As torch does: its gather would take a part."""

    def take(linear: nn.Module, x: Tensor) -> Tensor:
        return torch.take_along_dim(linear(x), torch.zeros(2, 3, 1, dtype=torch.int64), dim=-1)

    with pytest.raises(CaptureError, match="take_along_dim"):
        capture(Within(take), (torch.randn(2, 4, 4),), check_eval=False)

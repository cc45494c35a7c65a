"""What scripts do with a model's modules works on what parallelize returned, or is refused: equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, update_bn

import autopart
from autopart.runtime.errors import NotHereError, PlanError
from launch import launch

WIDTH = 8
LIMITS: dict[str, Any] = {"dp": 1, "tp": 1, "microbatches": 2, "verbose": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.first(x)) * self.scale)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.features(x)) - y).square().mean()


def batch(step: int) -> tuple[Tensor, ...]:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64).unbind()


def fixed(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm1d):
        module.eval()


def started(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)


def in_modules(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        fixed(module)


def by_apply(model: nn.Module) -> None:
    model.train().apply(fixed)


def trained(wrap: Callable[[nn.Module], nn.Module], fix: Callable[[nn.Module], None], held: bool) -> dict[str, Tensor]:
    """A script that starts weights anew, groups parameters by their modules, and keeps statistics fixed."""
    torch.manual_seed(0)
    made: Any = wrap(Net().double())
    model: nn.Module = nn.Sequential(made) if held else made
    model.apply(started)
    if not held:
        assert made.first.in_features == WIDTH
    plain = {id(p) for item in model.modules() if isinstance(item, nn.BatchNorm1d) for p in item.parameters()}
    assert len(plain) == 2 and len(list(model.parameters())) == 7
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if id(p) in plain], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if id(p) not in plain], "weight_decay": 0.5},
        ],
        lr=0.05,
    )
    for step in range(3):
        fix(made)
        made(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in made.state_dict().items()}


def both() -> None:
    for fix in (in_modules, by_apply):
        for held in (False, True):
            expected = trained(lambda model: model, fix, held)
            found = trained(lambda model: autopart.parallelize(model, pp=2, **LIMITS), fix, held)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_scripts_that_go_over_modules_train_as_in_one_process() -> None:
    launch(both, 2)


def refusing() -> None:
    model: Any = autopart.parallelize(Net().double(), pp=2, **LIMITS)
    assert model.first is model.original.first and not hasattr(model, "features")
    with pytest.raises(
        NotHereError, match=r"'features' is of Net, of which the parallel program runs forward\(\) alone"
    ):
        model.features(batch(0)[0])
    model(*batch(0)).backward()
    assert not hasattr(model, "first")
    with pytest.raises(
        NotHereError, match=r"parameters are those of model.named_parameters\(\) that begin with 'first'"
    ):
        model.first.parameters()
    with pytest.raises(
        PlanError, match=r"apply\(\) (wrote|failed).*shares; initialize before the first call, or load values"
    ):
        model.apply(started)


def test_parts_of_a_planned_model_are_refused() -> None:
    launch(refusing, 2)


def test_parts_of_a_model_on_meta_are_not_given() -> None:
    """Their parameters are not the ones that will train."""
    with autopart.parameters_on_meta():
        model: Any = autopart.parallelize(Net(), verbose=False)
    with pytest.raises(NotHereError, match="until it is made"):
        model.first.parameters()


def compiled() -> None:
    """Of what torch.compile is given, nothing is compiled."""
    results = []
    for parallel in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        model: Any = torch.compile(autopart.parallelize(net, pp=2, **LIMITS) if parallel else net, backend="eager")
        with torch.no_grad():
            results.append([model.train(False)(*batch(step)).item() for step in range(2)])
    assert results[1] == pytest.approx(results[0], rel=1e-9)


def test_torch_compile_leaves_it_as_it_is() -> None:
    launch(compiled, 2)


def test_modules_are_listed_where_another_module_holds_the_model() -> None:
    """So what looks for layers of a kind finds them, and is refused if it writes their statistics."""
    model = autopart.parallelize(Net().double(), **LIMITS)
    mean = AveragedModel(model)
    for held in (model, mean):
        held(*batch(0)).backward()
        kinds = [type(module) for module in held.modules()]
        assert kinds.count(nn.BatchNorm1d) == 1 and kinds.count(nn.Linear) == 2
        assert any(name.endswith("norm") for name, _ in held.named_modules())
        plain = {f"{'module.' if held is mean else ''}{name}" for name, _ in Net().named_parameters()}
        assert {name for name, _ in held.named_parameters()} == plain
        assert len([*held.parameters()]) == len([*held.named_parameters(remove_duplicate=False)]) == len(plain)
        with pytest.raises(PlanError, match=r"running_mean.*was set on the original once it was planned"):
            update_bn([batch(1)[0]], Called(held))


class Called(nn.Module):
    """A model of one input, as loaders of statistics call it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.model(x, x))


class Holding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.inner(x, y)


@pytest.mark.parametrize("held", [False, True], ids=["itself", "in another module"])
@pytest.mark.parametrize("planned", [False, True])
def test_computing_with_other_tensors_is_refused(planned: bool, held: bool) -> None:
    parallel = autopart.parallelize(Net().double(), **LIMITS)
    if planned:
        parallel(*batch(0))
    model = Holding(parallel) if held else parallel
    given: dict[str, Tensor] = {name: nn.Parameter(2 * value.detach()) for name, value in model.named_parameters()}
    with pytest.raises(PlanError, match="functional_call computes a model with other tensors"):
        functional_call(model, given, batch(0))

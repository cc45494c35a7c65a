"""Optimizers on programs: right, or refused with the reason; parameter groups; frozen parameters and LoRA."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopart
from autopart.runtime.errors import PlanError
from launch import launch
from two_layers import DP, PP, TP, batch, build, parallel


class Lamb(torch.optim.Optimizer):
    """A ratio of norms for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.norm() / p.grad.detach().norm() * p.grad


class Together(torch.optim.Optimizer):
    """Divides by the length of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            length = sum(p.grad.detach().square().sum() for p in own) ** 0.5
            for p in own:
                p -= group["lr"] / length * p.grad


class Closure(Together):
    """Asks for the loss, as L-BFGS does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class Strange(torch.optim.SGD):
    """Cannot be made a second time."""

    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, lr=0.1)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and name != "unused"]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    "muon": lambda model: torch.optim.Muon(matrices(model), lr=0.1),
    "lamb": lambda model: Lamb(model.parameters()),
    "lamb from zero": lambda model: Lamb(model.parameters(), lr=0.0),
    "together": lambda model: Together(model.parameters()),
    "closure": lambda model: Closure(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2),
    "strange": lambda model: Strange(model.parameters(), 3),
}


def train(model: nn.Module, name: str) -> dict[str, Tensor]:
    optimizer = OPTIMIZERS[name](model)
    for _ in range(3):
        if name in ("closure", "lbfgs"):
            optimizer.step(partial(computed, model, optimizer))
            continue
        model(**batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def computed(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(**batch())
    loss.backward()
    return loss.item()


def all_of(limits: dict[str, Any], names: list[str]) -> dict[str, dict[str, Tensor] | str]:
    found: dict[str, dict[str, Tensor] | str] = {}
    for name in names:
        try:
            found[name] = train(parallel(limits), name)
        except PlanError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("limits", "right", "refused"),
    [
        (
            PP,
            ["adamw", "sgd", "adafactor", "muon", "lamb"],
            {"together": "all others", "strange": "secret", "closure": "all others", "lbfgs": "all others.*zero=0"},
        ),
        (
            TP,
            ["adamw", "sgd", "adagrad"],
            {
                "adafactor": "Adafactor looks at a whole parameter .*'first.weight'.*tp=1",
                "muon": "Muon looks",
                "lamb": "Lamb looks",
                "lamb from zero": "Lamb looks",
                "together": "all others",
            },
        ),
        (DP, ["adafactor", "together", "strange", "closure", "lbfgs"], {}),
        ({**DP, "zero": 1}, ["adamw"], {"adafactor": "tp=1 and zero=0", "lbfgs": "all others.*zero=0"}),
    ],
    ids=["pp", "tp", "dp", "zero"],
)
def test_optimizers_are_right_or_refused(limits: dict[str, Any], right: list[str], refused: dict[str, str]) -> None:
    expected = {name: train(build(), name) for name in right}
    results = launch(all_of, 2, limits, [*right, *refused])
    for found in results:
        for name, state in expected.items():
            for key, tensor in state.items():
                weights = found[name]
                assert not isinstance(weights, str), weights
                # Muon computes in bfloat16
                rtol, atol = (1e-2, 1e-2) if name == "muon" else (1e-9, 1e-12)
                torch.testing.assert_close(weights[key], tensor, rtol=rtol, atol=atol)
    for name, message in refused.items():
        # ranks without the parameter in question may go on; one that raises ends the job
        texts = [found[name] for found in results]
        assert any(isinstance(text, str) for text in texts), name
        for text in texts:
            with pytest.raises(PlanError, match=message):
                raise PlanError(text)


def grouped(limits: dict[str, Any] | None) -> dict[str, Tensor]:
    """Decay by number of dims, the rate by name, and a scheduler: what scripts do with parameters."""
    model = build() if limits is None else parallel(limits)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named.items() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for n, p in named.items() if p.dim() >= 2 and n.startswith("first")], "lr": 0.02},
        {"params": [p for n, p in named.items() if p.dim() >= 2 and not n.startswith("first")]},
    ]
    assert [len(group["params"]) for group in groups] == [5, 1, 1], "made before the first call: the whole model"
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02, 0.1], total_steps=4)
    for _ in range(3):
        model(**batch()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    dims = {name: tensor.dim() for name, tensor in build().named_parameters()}
    assert all(p.dim() == dims[name] for name, p in model.named_parameters())
    return model.state_dict()


@pytest.mark.parametrize("limits", [PP, TP], ids=["pp", "tp"])
def test_parameter_groups_by_name_and_by_dims(limits: dict[str, Any]) -> None:
    expected = grouped(None)
    for state in launch(grouped, 2, limits):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def step_while_another_model_is_freed() -> None:
    models = [parallel(PP) for _ in range(2)]
    for model in models:
        model(**batch()).backward()
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)

    def let_go(*_: Any) -> None:
        models[0] = models[1]
        gc.collect()

    freed = weakref.ref(models[0].parallel)
    hook = register_optimizer_step_pre_hook(let_go)
    optimizer.step()
    hook.remove()
    assert freed() is None


def test_a_model_that_is_freed_while_another_steps() -> None:
    launch(step_while_another_model_is_freed, 2)


def first_call_in_a_closure() -> str:
    torch.manual_seed(0)
    model = parallel(PP)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch())
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except PlanError as error:
        return str(error)
    return ""


def test_a_step_whose_closure_calls_the_model_first_is_refused_too() -> None:
    for told in launch(first_call_in_a_closure, 2):
        assert "LBFGS updates a parameter by what it knows of all others" in told


class Lora(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, False), nn.Linear(rank, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0


class Adapted(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora(nn.Linear(16, 16), 2) for _ in range(layers))
        self.head = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


def adapt(limits: dict[str, Any] | None) -> tuple[dict[str, Tensor], int, set[str]]:
    """The weights after three clipped steps, bytes of gradients exchanged in each, and whose gradients there are."""
    torch.manual_seed(0)
    model: nn.Module = Adapted().double()
    if limits is not None:
        model = autopart.parallelize(model, verbose=False, **limits)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 16, generator=generator, dtype=torch.float64), torch.arange(8) % 4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        model(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
        optimizer.zero_grad()
    program = getattr(model, "parallel", None)
    counts = {} if program is None else program.traffic.counts()
    sums = sum(
        count.bytes for (operation, axis, _), count in counts.items() if (operation, axis) == ("all_reduce", "dp")
    )
    return model.state_dict(), sums // 3, with_gradient


def test_what_is_frozen_has_no_gradient_traffic() -> None:
    expected, _, trained = adapt(None)
    assert trained == {f"layers.{i}.{name}.weight" for i in range(3) for name in ("down", "up")}
    for state, bytes_, found in launch(adapt, 2, DP):
        assert found == trained
        assert bytes_ == 3 * 2 * 2 * 16 * 8 + 8, "down and up of three layers and the loss, in float64"
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    results = launch(adapt, 2, PP)
    assert set.union(*(found for _, _, found in results)) == trained
    for state, _, _ in results:
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


class Spectral(nn.Module):
    """Weights that multiply frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8).square().mean()


def of_complex_numbers() -> None:
    models: list[Any] = []
    zero: dict[str, Any] = {"pp": 1, "dp": 2, "tp": 1, "microbatches": 1, "zero": 1}
    for limits in ({}, zero):
        torch.manual_seed(0)
        models.append(autopart.parallelize(Spectral(), verbose=False, **limits) if limits else Spectral())
        optimizer = torch.optim.AdamW(models[-1].parameters(), 0.01)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of imaginary parts that are left out
            x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            models[-1](x).backward()
            optimizer.step()
    found, expected = (model.state_dict()["weight"] for model in reversed(models))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_optimizers_of_complex_numbers() -> None:
    launch(of_complex_numbers, 2)

"""What capture loses is said: a torch.autograd.Function's own backward, draws of NumPy's and Python's generators."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.cluster import Cluster
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from autopart.verify import verify
from programs import run_graph


class Round(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversed(torch.autograd.Function):
    """A gradient that turns back on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -gradients[0], None


class Swish(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradients[0] * gate * (1 + x * (1 - gate))


class Product(torch.autograd.Function):
    """The newer form, whose forward has no context; of a constant there is no gradient."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return x * factor, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.saved_tensors[0], None


class Kernel(torch.autograd.Function):
    """Runs on no device that is here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("no kernel")
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Speaking(Kernel):
    """Would wait for others, if it was run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            torch.distributed.all_reduce(x)
        return x.sin()


class Clipped(torch.autograd.Function):
    """A straight-through estimator of small numbers, in the newer form."""

    @staticmethod
    def forward(x: Tensor, most: float) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Any) -> None:
        x, ctx.most = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x.abs() <= ctx.most), None


class Spread(Round):
    """Every number's gradient to all."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].sum().expand_as(gradients[0])


class Clamped(Round):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.1, 0.1)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversible(torch.autograd.Function):
    """Adds its layer's gradients up by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x.detach())
        ctx.layer = layer
        return torch.as_tensor(layer(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].requires_grad_()
            ctx.layer(x).backward(gradients[0])
        return x.grad, None


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 1), function

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(self.first(x))
        return torch.as_tensor(self.last(found[0] if isinstance(found, tuple) else found).mean())


def _notes(function: Callable[[Tensor], Any]) -> list[str]:
    found = capture(Between(function), (torch.randn(4, 4),), check_eval=False).notes
    return [note for note in found if "backward of its own" in note]


@pytest.mark.parametrize("function", [Spread, Clamped, InPlace])
def test_a_backward_that_is_another_derivative_is_refused(function: Any) -> None:
    name = function.__name__
    with pytest.raises(CaptureError, match=rf"(?s){name}, applied at .*test_own_backwards.py:\d+, has a backward that"):
        _notes(function.apply)


SCALED: dict[str, Callable[[Tensor], Tensor]] = {
    "straight through": Round.apply,
    "clipped": lambda x: Clipped.apply(x, 0.5),
    "reversed": lambda x: Reversed.apply(x, x.shape[0]),
    "twice": lambda x: Round.apply(2 * Round.apply(x)),
    "of many": lambda x: Round.apply(x.mean() * torch.ones(2049, 2048))[:4, :4],
}


@pytest.mark.parametrize("name", SCALED)
def test_one_that_scales_the_gradient_is_made_of_tensor_ops(name: str) -> None:
    model, x = Between(SCALED[name]), torch.randn(4, 4)
    program = capture(model, (x,), check_eval=False)
    assert not program.notes
    (found,) = run_graph(program, program.graph, model, {"x": x}, 4)
    assert torch.equal(found, model(x))
    made, expected = (torch.autograd.grad(loss, list(model.parameters())) for loss in (found, model(x)))
    assert all(map(torch.equal, made, expected)) and made[0].any()


class Quantized(nn.Module):
    """Of layers whose weights are rounded, trained straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = torch.as_tensor(Round.apply(8 * layer.weight)) / 8  # type: ignore[operator]
            x = torch.as_tensor(Clipped.apply(nn.functional.linear(x, weight, layer.bias), 0.5))  # type: ignore[arg-type]
        return x.square().mean() + (x - 1).abs().mean()


@pytest.mark.parametrize("limits", [{"pp": 2, "microbatches": 2}, {"tp": 2}])
def test_it_trains_as_in_one_process(limits: dict[str, int]) -> None:
    torch.manual_seed(0)
    found = verify(Quantized(), (torch.randn(8, 4),), cluster=Cluster.parse("cpu:2"), limits=limits)
    assert found.equal


def test_one_that_is_its_forward_s_is_not_spoken_of() -> None:
    factor = torch.rand(4)
    assert not _notes(Swish.apply)
    assert not _notes(lambda x: Product.apply(x, factor))
    assert not _notes(lambda x: x + Spread.apply(x.detach())), "it has no gradient"


def test_of_one_that_cannot_be_run_is_said_once_that_it_is_not_used() -> None:
    (note,) = _notes(lambda x: Kernel.apply(Kernel.apply(x)))
    assert note.startswith("Kernel has")
    (note,) = _notes(Speaking.apply)
    assert note.startswith("Speaking has")
    layer = nn.Linear(4, 4)
    (note,) = _notes(lambda x: Reversible.apply(x, layer))
    assert note.startswith("Reversible has") and layer.weight.grad is None
    assert "apply" not in vars(_SingleLevelFunction)
    assert not _notes(nn.Identity())


def test_a_script_is_warned_where_no_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="Kernel has a backward of its own"):
        autopart.parallelize(Between(Kernel.apply), verbose=False, example=(torch.randn(4, 4),))
    assert "Between on cpu" not in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        autopart.parallelize(Between(Kernel.apply), example=(torch.randn(4, 4),))
    assert "Kernel has a backward of its own" in capsys.readouterr().err


class Hooked(nn.Module):
    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(4, 4), nn.Linear(4, 1), hook

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        return torch.as_tensor(self.last(hidden).mean())


def test_hooks_on_gradients_are_said() -> None:
    before, model = torch.Tensor.register_hook, Hooked(lambda gradient: None)
    model.first.register_full_backward_hook(lambda module, there, back: None)
    model.first.weight.register_hook(lambda gradient: gradient)
    notes = [note for note in capture(model, (torch.randn(4, 4),), check_eval=False).notes if "hook" in note]
    assert [note.partition(" has a hook")[0] for note in notes] == ["module first", "a tensor in forward"]
    assert torch.Tensor.register_hook is before


@pytest.mark.parametrize("hook", [lambda found: found / 2, lambda found: found.mul_(2), torch.sum])
def test_a_hook_that_changes_a_gradient_is_refused(hook: Callable[[Tensor], Tensor | None]) -> None:
    with pytest.raises(
        CaptureError, match=r"that .*test_own_backwards.py:\d+ registers on a tensor changes its gradient"
    ):
        capture(Hooked(hook), (torch.randn(4, 4),), check_eval=False)
    (note,) = capture(Hooked(lambda gradient: gradient), (torch.randn(4, 4),), check_eval=False).notes
    assert "a tensor in forward has a hook on its gradients" in note


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(self.first(x)).mean())


def test_a_hook_that_changes_gradients_of_a_module_is_refused() -> None:
    inputs = (torch.randn(4, 4),)
    looked = Two()
    same: Any = lambda module, into, out: (into[0] * 1.0,)  # noqa: E731
    looked.last.register_full_backward_hook(same)
    looked.last.register_full_backward_pre_hook(lambda module, out: None)
    (note,) = capture(looked, inputs, check_eval=False).notes
    assert "module last has a hook on its gradients" in note
    changes: list[Any] = [lambda module, into, out: (into[0] / 2,), lambda module, into, out: into[0].mul_(2)]
    for change in changes:
        changed = Two()
        changed.last.register_full_backward_hook(change)
        with pytest.raises(CaptureError, match=r"on gradients of module last changes them.* on what a module is given"):
            capture(changed, inputs, check_eval=False)
    changed = Two()
    clipped: Any = lambda module, out: (out[0].clamp(-0.1, 0.1),)  # noqa: E731
    changed.first.register_full_backward_pre_hook(clipped)
    with pytest.raises(CaptureError, match=r"on gradients of module first changes them.* on what a module made"):
        capture(changed, inputs, check_eval=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_checkpointed_has_gradients(reentrant: bool) -> None:
    """A reentrant one runs its function in a Function without gradients."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            inside = checkpoint(self.last, self.first(x).relu(), use_reentrant=reentrant)
            return torch.as_tensor(inside.mean())

    x = torch.randn(4, 4)
    model = Checkpointed()
    program = capture(model, (x,), check_eval=False)
    assert not program.notes
    (found,) = run_graph(program, program.graph, model, {"x": x}, 4)
    made = torch.autograd.grad(found, list(model.parameters()))
    model(x).backward()  # a reentrant one knows no other way
    torch.testing.assert_close(made, tuple(parameter.grad for parameter in model.parameters()))


class DropsLayers(nn.Module):
    """One layer, skipped at random by a generator that is not torch's."""

    def __init__(self, generator: str) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 1), generator

    def forward(self, x: Tensor) -> Tensor:
        draws: dict[str, Callable[[], float]] = {"numpy": np.random.random, "python": random.random}
        drawn = draws[self.generator]() if self.generator in draws else 1.0
        return torch.as_tensor(self.layer(x).mean() * (1.0 if drawn > 1e-9 else 0.0))


@pytest.mark.parametrize(
    ("generator", "name"), [("numpy", "numpy.random"), ("python", "Python's random"), ("none", "")]
)
def test_draws_of_other_generators_are_said(generator: str, name: str) -> None:
    notes = [
        note
        for note in capture(DropsLayers(generator), (torch.randn(4, 4),), check_eval=False).notes
        if "draws from" in note
    ]
    assert len(notes) == bool(name) and all(f"draws from {name} while" in note for note in notes)


def test_hooks_on_forward_are_said() -> None:
    """Those of torch, which compute and keep nothing, are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prune.identity(model[0], "weight")
    example = (torch.randn(4, 4),)
    assert not [note for note in capture(model, example, check_eval=False).notes if "on forward" in note]
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, given, out: seen.append(out))
    (note,) = [note for note in capture(model, example, check_eval=False).notes if "on forward" in note]
    assert note.startswith("module 1 has a hook on forward (") and "output of forward" in note

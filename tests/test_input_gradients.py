"""Gradients of inputs: what a generator made, embeddings, samples that are changed, equal to one process'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import InputError
from clusters import ideal
from launch import launch

Wrap = Callable[[nn.Module], Any]


class Net(nn.Module):
    """The input is read by the first layers and by the last; ``prefix`` is the same for all samples."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.inside = inside

    def forward(self, x: Tensor, prefix: Tensor, target: Tensor) -> Any:
        found = x * 2 + prefix
        for layer in self.layers:
            found = torch.tanh(layer(found))
        found = found + x.sin()
        return (found - target).square().mean() if self.inside else found


def batch(step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 8, 8, generator=made, dtype=torch.float64).unbind()
    return x, torch.randn(3, 8, generator=made, dtype=torch.float64)[0], target


def gradients(model: Any, inside: bool, own: slice) -> list[Tensor]:
    """Of inputs at calls with none, one, two and again one that requires them; of scaled and of accumulated losses."""
    found = []
    for step, asked in enumerate(((), (0,), (0, 1), (0,))):
        tensors = [tensor[own] if at != 1 else tensor for at, tensor in enumerate(batch(step))]
        leaves = [tensor.clone().requires_grad_(at in asked) for at, tensor in enumerate(tensors)]
        for factor in (1.0, -0.5):
            given = [leaf * 3 if factor < 0 and leaf.requires_grad else leaf for leaf in leaves]
            result = model(*given)
            loss = result if inside else (result - batch(step)[2]).square().mean()
            (factor * loss).backward()
        found += [leaf.grad for leaf in leaves if leaf.grad is not None]
    return found


def wrapped(limits: dict[str, Any]) -> Wrap:
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, **limits}
    return lambda model: autopart.parallelize(model, cluster=ideal(2), verbose=False, **settings)


def compare(cases: list[dict[str, Any]], inside: bool) -> None:
    torch.manual_seed(0)
    plain = Net(inside).double()
    expected = gradients(plain, inside, slice(None))
    for limits in cases:
        net = copy.deepcopy(plain)
        net.zero_grad()
        model = wrapped({**limits, "batch_dims": {"prefix": None}})(net)
        local = limits.get("batch") == "local"
        rank = torch.distributed.get_rank()
        own = slice(4 * rank, 4 * rank + 4) if local else slice(None)
        found = gradients(model, inside, own)
        wanted = [tensor[own] if tensor.dim() > 1 else tensor for tensor in expected]
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        named = dict(plain.named_parameters())
        if limits.get("tp", 1) * limits.get("zero", 1) == 1:
            held = [(name, parameter) for name, parameter in model.named_parameters() if parameter.numel()]
            for name, parameter in held:
                torch.testing.assert_close(parameter.grad, named[name].grad, rtol=1e-9, atol=1e-12)
            assert held


PIPELINES = [{"pp": 2, "microbatches": 2, "schedule": name} for name in ("1f1b", "zb-h1")]
REPLICAS = [{"dp": 2, "microbatches": 2}, {"dp": 2, "zero": 3}, {"dp": 2, "microbatches": 2, "batch": "local"}]


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
@pytest.mark.parametrize(
    ("cases", "inside"),
    [
        (PIPELINES, True),
        ([{"pp": 2, "microbatches": 2}], False),
        (REPLICAS, True),
        (REPLICAS, False),
        ([{"tp": 2}, {"pp": 2, "recompute": "full"}], True),
    ],
)
def test_gradients_of_inputs_are_those_of_one_process(cases: list[dict[str, Any]], inside: bool) -> None:
    launch(compare, 2, cases, inside)


class Critic(nn.Module):
    """Of points, read by both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found = x
        for layer in self.layers:
            found = torch.tanh(layer(found))
        return (found * x).sum(-1)


class Generator(Critic):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)[:, None]


class Unreading(Critic):
    def forward(self, x: Tensor, unread: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).mean() + 0 * unread.size(0)


def adversarial(wrap: Wrap) -> tuple[list[float], list[Tensor]]:
    """Both models trained in turn; then the critic frozen, and samples changed against it."""
    torch.manual_seed(0)
    generator, critic = wrap(Generator().double()), wrap(Critic().double())
    steps = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (generator, critic)]
    losses = []
    for step in range(3):
        real, _, noise = batch(step)
        loss = critic(generator(noise).detach()).mean() - critic(real).mean()
        loss.backward()
        steps[1].step()
        steps[1].zero_grad()
        losses.append(loss.item())
        loss = -critic(generator(noise)).mean()
        loss.backward()
        steps[0].step()
        for optimizer in steps:
            optimizer.zero_grad()
        losses.append(loss.item())
    critic.requires_grad_(False)
    sample = batch(5)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(critic(sample).sum(), [sample])
    critic(sample + gradient.sign()).square().sum().backward()
    assert sample.grad is not None
    return losses, [gradient, sample.grad, *generator.state_dict().values()]


def with_critics(cases: list[dict[str, Any]]) -> None:
    expected = adversarial(lambda model: model)
    for limits in cases:
        found = adversarial(wrapped(limits))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    late = wrapped({"pp": 2, "microbatches": 2, "schedule": "2bw", "loss_fn": lambda found, _: found.mean()})
    with pytest.raises(InputError, match="2bw gives no gradients of inputs, as of 'x'"):
        late(Critic().double())(batch()[0].requires_grad_(), targets=batch()[1])


def on_unlike_meshes(shares: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Net(inside=True).double()
    expected = gradients(plain, True, slice(None))
    program = autopart.capture(plain, batch(), batch_dims={"prefix": None})
    plan = autopart.make_plan(program, ideal(2), pp=2, dp=1, tp=1, microbatches=2)
    first, second = plan.stages
    stages = (
        replace(first, devices=(0, 1), mesh=(("dp", 2), ("tp", 1)), shares=shares),
        replace(second, devices=(2,), mesh=(("dp", 1), ("tp", 1))),
    )
    plan = replace(plan, stages=stages, warmup=())
    model = autopart.parallelize(plain, plan=plan, verbose=False, batch_dims={"prefix": None})
    torch.testing.assert_close(gradients(model, True, slice(None)), expected, rtol=1e-9, atol=1e-12)


def test_gradients_of_inputs_on_unlike_meshes() -> None:
    launch(on_unlike_meshes, 3, (3, 1))


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
def test_a_generator_learns_through_its_critic() -> None:
    launch(with_critics, 2, [{"pp": 2, "microbatches": 2}, {"dp": 2, "zero": 1}, {"tp": 2}])


@pytest.mark.filterwarnings("ignore:the loss is computed outside")
def test_what_no_call_gives_is_refused() -> None:
    model: Any = autopart.parallelize(Critic().double(), verbose=False)
    sample = batch()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(sample).sum(), [sample])  # captured with it
    plain = copy.deepcopy(Critic()).double()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(gradient, torch.autograd.grad(plain(sample).sum(), [sample])[0])
    with pytest.raises(InputError, match="create_graph=True asks for gradients that have gradients"):
        torch.autograd.grad(model(sample).sum(), [sample], create_graph=True)
    unread = batch()[1].requires_grad_()
    autopart.parallelize(Unreading().double(), verbose=False)(sample, unread).sum().backward()
    assert sample.grad is not None and unread.grad is None
    with torch.no_grad():
        torch.testing.assert_close(model(sample), plain(sample))
    model.eval().requires_grad_(False)
    with pytest.raises(InputError, match="in evaluation mode a call runs forward alone"):
        model(sample).sum().backward()

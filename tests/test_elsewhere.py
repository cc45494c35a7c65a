"""Parameters and buffers of other stages: in every list in the original's order, and never taken for values."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopart
from autopart.runtime.errors import PlanError
from clusters import ideal
from launch import launch


class Net(nn.Module):
    """Equal layers, with statistics and numbers without dims, the first and last of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.layers[0].get_parameter("weight")
        self.register_buffer("unread", torch.arange(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return (self.head(x) * self.scale - y).square().mean()


def batch(seed: int = 0) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(2, 8, 6, generator=made, dtype=torch.float64).unbind()


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


PINS = {"layers.1": 0, "layers.2": 1}


def parallelized(net: nn.Module, **settings: Any) -> Any:
    limits = {"pp": 2, "dp": 1, "tp": 1, "microbatches": 1, "pins": PINS, **settings}
    return autopart.parallelize(net, cluster=ideal(2), verbose=False, **limits)


def named(model: nn.Module, **options: Any) -> list[tuple[str, ...]]:
    return [
        tuple(name for name, _ in model.named_parameters("in", **options)),
        tuple(name for name, _ in model.named_buffers("in", **options)),
    ]


def listed() -> None:
    model, plain = parallelized(build()), build()
    ways: list[dict[str, bool]] = [{}, {"remove_duplicate": False}, {"recurse": False}]
    before = [named(plain, **way) for way in ways]
    assert [named(model, **way) for way in ways] == before
    held = dict(model.named_parameters())
    model(*batch()).backward()
    assert [named(model, **way) for way in ways] == before
    assert [*map(id, model.parameters())] == [*map(id, held.values())]
    wrapped = nn.Sequential(model)
    assert [*map(id, wrapped.parameters())] == [*map(id, held.values())]
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    own = {name for name, parameter in held.items() if parameter.shape == shapes[name]}
    for name, parameter in held.items():
        assert parameter.dim() == max(plain.get_parameter(name).dim(), 0 if name in own else 1)
        assert (parameter.grad is not None) == (name in own)
        assert parameter.numel() == (plain.get_parameter(name).numel() if name in own else 0)
    sizes = [buffer.numel() for _, buffer in model.named_buffers()]
    assert 0 < sizes.count(0) < len(sizes)
    given: list[Any] = [None, None]
    dist.all_gather_object(given, own)
    assert given[0] | given[1] == shapes.keys() and given[0] & given[1] == {"layers.0.weight"}


def test_lists_are_the_same_before_and_after_on_all_ranks() -> None:
    launch(listed, 2)


def states_in_turn() -> None:
    net = build()
    mean = copy.deepcopy(net)
    model = parallelized(net)
    model(*batch()).backward()
    assert [*model.state_dict()] == [*mean.state_dict()]
    assert [*nn.Sequential(model).state_dict()] == [*nn.Sequential(mean).state_dict()]
    for average, value in zip(mean.state_dict().values(), model.state_dict().values(), strict=True):
        average.copy_(value)
    assert all(torch.equal(mean.state_dict()[name], value) for name, value in model.state_dict().items())


def test_states_are_in_the_order_of_the_original() -> None:
    launch(states_in_turn, 2)


def by_zip(mean: Any, model: Any) -> None:
    for average, value in zip(mean.parameters(), model.parameters(), strict=True):
        average.mul_(0.75).add_(value, alpha=0.25)


def by_copies(mean: Any, model: Any) -> None:
    for average, value in zip(mean.parameters(), model.parameters(), strict=True):
        average.data.copy_(0.75 * average.data + 0.25 * value.data)


def by_lists(mean: Any, model: Any) -> None:
    torch._foreach_lerp_([*mean.parameters()], [*model.parameters()], 0.25)


def by_names(mean: Any, model: Any) -> None:
    values = dict(model.named_parameters())
    for name, average in mean.named_parameters():
        average.lerp_(values[name], 0.25)


def of_buffers(mean: Any, model: Any) -> None:
    for average, value in zip(mean.buffers(), model.buffers(), strict=True):
        average.copy_(value)


def back(mean: Any, model: Any) -> None:
    for average, value in zip(mean.parameters(), model.parameters(), strict=True):
        value.copy_(average)


WAYS: list[Callable[[Any, Any], None]] = [by_zip, by_copies, by_lists, by_names, of_buffers, back]


def not_parallelized() -> None:
    net = build()
    averages: list[Any] = [copy.deepcopy(net).requires_grad_(False) for _ in WAYS]
    swa: Any = AveragedModel(net, avg_fn=lambda mean, value, _: mean + 0.5 * (value - mean))
    model = parallelized(net)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    model(*batch()).backward()
    for way, mean in zip(WAYS, averages, strict=True):
        with torch.no_grad(), pytest.raises(PlanError, match=r"of stage [01], of which this rank has no elements"):
            way(mean, model)
    with torch.no_grad(), pytest.raises(PlanError, match=r"of which this rank has no elements: .*copy.deepcopy of"):
        for average, value in zip(kept, model.parameters(), strict=True):
            average.lerp_(value, 0.25)
    with pytest.raises(PlanError, match="of which this rank has no elements"):
        swa.update_parameters(model)


def test_averages_that_are_not_parallelized_are_told() -> None:
    launch(not_parallelized, 2)


def ended(script: Callable[[], None]) -> str:
    """What a script that ends in an error shows: the error with what is added to it."""
    try:
        script()
    except Exception as error:
        with redirect_stderr(io.StringIO()) as shown:
            sys.excepthook(type(error), error, error.__traceback__)
        return shown.getvalue()
    raise AssertionError("it does not fail")


def with_copies_of_before(limits: dict[str, Any]) -> None:
    net = build()
    kept = [parameter.detach().clone() for parameter in net.parameters()]
    model = parallelized(net, pins=None, **limits)
    model(*batch()).backward()

    def one_by_one() -> None:
        for average, value in zip(kept, model.parameters(), strict=True):
            average.mul_(0.5).add_(value.detach(), alpha=0.5)

    def as_lists() -> None:
        torch._foreach_lerp_(kept, [*model.parameters()], 0.5)

    def unlike() -> None:
        value = next(model.parameters())
        raise RuntimeError(f"{value.dtype} is a type, of which none of this tells")

    for script in (one_by_one, as_lists):
        shown = ended(script)
        assert "RuntimeError: " in shown and "is divided: this rank has [3" in shown
        assert "lists of tensors are made from these once" in shown
    assert "divided" not in ended(unlike)
    types = {type(parameter) for parameter in model.parameters()}
    assert types == {nn.Parameter}, "optimizers look at it"


@pytest.mark.parametrize("level", [1, 3])
def test_copies_of_before_that_meet_shares_are_told(level: int) -> None:
    launch(with_copies_of_before, 2, {"pp": 1, "dp": 2, "zero": level})


def without_gradients() -> None:
    model = parallelized(build())
    model(*batch()).backward()

    def scaled() -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)

    def divided() -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad / 2

    for script in (scaled, divided):
        shown = ended(script)
        assert "NoneType" in shown and "has no elements on this rank, and no gradient: pass over what has" in shown


def test_gradients_that_other_stages_have_are_told() -> None:
    launch(without_gradients, 2)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = model(*batch(seed))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def optimized(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    if kind == "Muon":
        return torch.optim.Muon(matrices, lr=0.1)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1)


def with_averages_of_what_is_planned() -> None:
    """Lists that are made once the model is planned go on together."""
    plain, net = build(), build()
    model = parallelized(net, example=batch())
    means = [[parameter.detach().clone() for parameter in of.parameters()] for of in (plain, model)]
    for of, mean in zip((plain, model), means, strict=True):
        optimizer = optimized(of, "AdamW")
        for seed in range(3):
            step(of, optimizer, seed)
            torch._foreach_lerp_(mean, [parameter.detach() for parameter in of.parameters()], 0.25)
    for expected, found in zip(*means, strict=True):
        if found.numel():
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_lists_that_are_made_later_go_together() -> None:
    launch(with_averages_of_what_is_planned, 2)


def resumed(kind: str, first: nn.Module, second: nn.Module) -> list[float]:
    """Losses, of which the second model and its optimizer go on with the state of the first."""
    optimizer = optimized(first, kind)
    losses = [step(first, optimizer, seed) for seed in range(2)]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    second.load_state_dict(first.state_dict())
    optimizer = optimized(second, kind)
    optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    copied = copy.deepcopy(optimizer).state_dict()
    assert copied["param_groups"] == optimizer.state_dict()["param_groups"]
    return losses + [step(second, optimizer, seed) for seed in range(2, 4)]


def optimizer_made_before_or_after(kind: str) -> None:
    """The state of one that was made before the first call goes on in one that is made after it, and of one process."""
    found = resumed(kind, parallelized(build()), parallelized(build(), example=batch()))
    assert found == pytest.approx(resumed(kind, build(), build()), rel=1e-9)
    from_one = resumed(kind, build(), parallelized(build(), example=batch()))
    assert found == pytest.approx(from_one, rel=1e-9)


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_optimizers_made_before_and_after_are_alike(kind: str) -> None:
    launch(optimizer_made_before_or_after, 2, kind)


def frozen_later() -> None:
    """What a script freezes by name once the model is planned, whichever rank has it."""
    plain = build()
    plain.layers.requires_grad_(False)
    model = parallelized(build(), example=batch())
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            parameter.requires_grad_(False)
    trained = [[p for p in of.parameters() if p.requires_grad] for of in (plain, model)]
    assert len(trained[0]) == len(trained[1])
    losses = []
    for of in (plain, model):
        optimizer = torch.optim.SGD([p for p in of.parameters() if p.requires_grad], lr=0.5)
        losses.append([step(of, optimizer, seed) for seed in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_what_is_frozen_later() -> None:
    launch(frozen_later, 2)


def saved() -> None:
    """As plain ones, which any script reads again."""
    model = parallelized(build(), example=batch())
    file = io.BytesIO()
    torch.save({**dict(model.named_parameters()), **dict(model.named_buffers())}, file)
    read = torch.load(io.BytesIO(file.getvalue()))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert type(read[name]) is (nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor)
        torch.testing.assert_close(read[name].detach(), tensor.detach(), rtol=0, atol=0)
        with torch.no_grad():
            tensor.copy_(read[name])


def test_they_are_saved_as_plain_ones() -> None:
    launch(saved, 2)

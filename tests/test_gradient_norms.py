"""Norms and clipping of gradients by torch's own functions, on programs whose ranks hold parts of the model."""

from __future__ import annotations

import copy
import io
import math
import pickle
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime import norms
from autopart.runtime.errors import InputError
from launch import launch
from two_layers import NAMES, PLANS, PP, TP, batch, build, parallel


def clipped(limits: dict[str, Any] | None, order: float, own: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of four steps, each of two backwards, and the weights after them."""
    model: nn.Module = build()
    if limits is not None:
        model = parallel(limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = []
    for step in range(4):
        for _ in range(2):
            (model(**batch()) * 3.0).backward()
        clip: Any = model.clip_grad_norm_ if own else partial(nn.utils.clip_grad_norm_, model.parameters())
        norm = clip(0.1, order)
        assert type(norm) is Tensor
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        found.append(norm.item())
    for state in optimizer.state.values():
        assert all(type(value) in (Tensor, float, int) for value in state.values() if value is not None)
    return found, model.state_dict()


@pytest.mark.parametrize("limits", PLANS, ids=str)
@pytest.mark.parametrize(
    ("order", "own"), [(2.0, False), (math.inf, False), (1.0, False), (2.0, True), (math.inf, True)]
)
def test_clipping_equals_the_plain_models(limits: dict[str, Any], order: float, own: bool) -> None:
    expected, state = clipped(None, order, False)
    assert all(norm > 0.1 for norm in expected), "every step is clipped"
    for found, weights in launch(clipped, 2, limits, order, own):
        assert found == pytest.approx(expected, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-9, atol=1e-12)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def refusals(limits: dict[str, Any]) -> dict[str, str]:
    model = parallel(limits)
    model(**batch()).backward()
    parameters, first = [p for p in model.parameters() if p.grad is not None], gradients(model)[0]
    found = {}

    def refused(name: str, take: Any) -> None:
        try:
            take()
        except InputError as error:
            found[name] = str(error)

    refused("some", lambda: nn.utils.clip_grad_norm_(parameters[:-1], 0.1))
    for matrix in (g for g in gradients(model) if g.dim() == 2):  # the last stage may have none
        refused("nuclear", partial(matrix.norm, "nuc"))
    refused("zero", lambda: nn.utils.get_total_norm(gradients(model), 0.0))
    refused("mixed", lambda: torch.stack([first.norm(), torch.ones(())]).norm())
    refused("share", lambda: first.norm().item())
    refused("data", lambda: first.data.norm().item() ** 2)
    # what is no norm is plain
    assert type(first * 2) is type(first) and type(first.sum(0)) is Tensor and type(first > 0) is Tensor
    return found


def test_what_would_be_a_norm_of_one_rank_is_refused() -> None:
    for found in launch(refusals, 2, TP):
        assert all("gradients of the" in found[name] for name in ("some", "mixed"))
        assert "model.clip_grad_norm_" in found["some"]
        assert "'nuc'" in found["nuclear"] and "0.0" in found["zero"]
        assert all("alone" in found[name] for name in ("share", "data"))
    for found in launch(refusals, 2, PP):
        assert {"some", "zero"} <= found.keys()


def clipped_in_part() -> str:
    norms.PATIENCE = timedelta(seconds=1)
    model = parallel(PP)
    model(**batch()).backward()
    rank = torch.distributed.get_rank()
    mine = [] if rank else [p for p in model.parameters() if p.grad is not None]
    try:
        nn.utils.clip_grad_norm_(mine, 0.1)
    except InputError as error:
        return str(error)
    time.sleep(3.0)  # as in the next step, where this rank would wait
    return ""


def test_a_norm_that_other_ranks_take_no_part_in_ends() -> None:
    first, second = launch(clipped_in_part, 2)
    assert "other ranks took no norm of their gradients for 1 s" in first and "call model.clip_grad_norm_" in first
    assert second == ""


def together(limits: dict[str, Any] | None, order: float) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Norms and weights of steps of two models and a layer beside them, whose parameters are clipped as one list."""
    models = [build() if limits is None else parallel(limits) for _ in range(2)]
    beside = nn.Linear(8, 8).double()
    for parameter in beside.parameters():
        nn.init.constant_(parameter, 0.5)
    models.append(beside)
    parameters = [parameter for model in models for parameter in model.parameters()]
    parameters = [*parameters[::2], *parameters[1::2]]  # so that ranks meet the models in unlike orders
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    found = []
    for _ in range(3):
        data = batch()
        (models[0](**data) + 2 * models[1](**data) + beside(data["x"]).square().mean()).backward()
        found.append(nn.utils.clip_grad_norm_(parameters, 0.1, order).item())
        optimizer.step()
        optimizer.zero_grad()
    return found, [dict(model.state_dict()) for model in models]


@pytest.mark.parametrize("limits", [*PLANS, {"dp": 2, "zero": 2}], ids=str)
def test_one_norm_of_several_models_and_layers_beside_them(limits: dict[str, Any]) -> None:
    for order in (2.0, math.inf):
        expected, states = together(None, order)
        for found, weights in launch(together, 2, limits, order):
            assert found == pytest.approx(expected, rel=1e-9)
            torch.testing.assert_close(weights, states, rtol=1e-9, atol=1e-12)


def of_unlike_models() -> str:
    models = [parallel(PP) for _ in range(2)]
    for model in models:
        model(**batch()).backward()
    mine = models[0] if torch.distributed.get_rank() else models[1]
    with pytest.raises(InputError) as caught:
        nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
    return str(caught.value)


def test_ranks_do_not_add_up_norms_of_unlike_models() -> None:
    assert all("norms of different models' gradients" in told for told in launch(of_unlike_models, 2))


def other_ways(limits: dict[str, Any]) -> None:
    model, plain = parallel(limits), build()
    model(**batch()).backward()
    plain(**batch()).backward()
    expected = nn.utils.get_total_norm(gradients(plain)).item()
    own = gradients(model)
    totals = [
        torch.norm(torch.stack([torch.norm(g, 2.0) for g in own]), 2.0).item(),
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own, 2.0))).item(),
        nn.utils.get_total_norm(own, foreach=True).item(),
        torch.norm(torch.stack([torch.norm(g.detach(), 2.0).to("cpu") for g in own]), 2.0).item(),
        torch.stack([g.data.norm(2) for g in own]).norm().item(),
        torch.stack([g.flatten().norm() for g in own]).norm().item(),
        torch.stack([g.detach().float().norm() for g in own]).norm().double().item(),
    ]
    assert totals[:6] == pytest.approx([expected] * 6, rel=1e-12) and totals[6] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("limits", PLANS[:2], ids=NAMES[:2])
def test_older_ways_of_writing_it_come_to_the_same(limits: dict[str, Any]) -> None:
    launch(other_ways, 2, limits)


def saved() -> list[type[Tensor]]:
    model = parallel(PP)
    model(**batch()).backward()
    own, file = gradients(model)[0], io.BytesIO()
    torch.save({"whole": own, "detached": own.detach()}, file)
    file.seek(0)
    found = [*torch.load(file).values(), copy.deepcopy(own), pickle.loads(pickle.dumps(own))]
    for tensor in found:
        torch.testing.assert_close(tensor, own.clone(), rtol=0, atol=0)
    return [type(tensor) for tensor in found]


def test_gradients_are_saved_and_copied_as_plain_tensors() -> None:
    assert launch(saved, 2) == [[Tensor] * 4] * 2


def zeroed(limits: dict[str, Any]) -> None:
    """As optimizers did it once."""
    model = parallel(limits)
    model(**batch()).backward()
    for gradient in gradients(model):
        gradient.detach_().zero_()
    again = parallel(limits)
    for one in (model, again):
        one(**batch()).backward()
    torch.testing.assert_close(
        [g.clone() for g in gradients(model)], [g.clone() for g in gradients(again)], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("limits", PLANS[:2], ids=NAMES[:2])
def test_gradients_are_detached_in_place(limits: dict[str, Any]) -> None:
    launch(zeroed, 2, limits)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8, dtype=torch.complex128)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((x + 0j) @ self.first @ self.second).abs().sub(y).square().mean()


def complex_norms(order: float, parted: bool) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Complex()
    if parted:
        model = autopart.parallelize(model, verbose=False, **PP)
    model(**batch()).backward()
    clip: Any = model.clip_grad_norm_ if parted else partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    return [clip(0.1, order).item() for _ in range(2)]


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_norms_of_complex_gradients(order: float) -> None:
    expected = complex_norms(order, False)
    assert expected[0] > 0.1 > 0.99 * expected[1]
    for found in launch(complex_norms, 2, order, True):
        assert found == pytest.approx(expected, rel=1e-9)


def hooked(limits: dict[str, Any] | None, norm: bool) -> dict[str, Tensor] | str:
    model = build() if limits is None else parallel(limits)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / (gradient.norm() if norm else 2))
    for _ in range(2):
        try:
            model(**batch()).backward()
        except InputError as error:
            return str(error)
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(
    ("limits", "refused"), [(PP, False), (TP, True), ({"pp": 1, "dp": 2, "tp": 1, "zero": 1}, True)]
)
def test_hooks_on_divided_parameters_take_no_norms(limits: dict[str, Any], refused: bool) -> None:
    for norm in (False, True):
        expected = hooked(None, norm)
        assert isinstance(expected, dict)
        for found in launch(hooked, 2, limits, norm):
            if norm and refused:
                assert isinstance(found, str) and "this rank's part of the model alone" in found
                continue
            assert isinstance(found, dict) and found
            for name, gradient in found.items():
                if gradient.shape == expected[name].shape:
                    torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def halved(model: nn.Module) -> None:
    model(**batch()).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / 2


def combined(model: nn.Module) -> None:
    """Of two losses, copied in between."""
    copies = []
    for _ in range(2):
        model.zero_grad()
        model(**batch()).backward()
        copies.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for parameter, one, two in zip(model.parameters(), *copies, strict=True):
        if one is not None and two is not None:
            parameter.grad = torch.where(one * two > 0, one + two, torch.zeros_like(one)).clamp(-1, 1)


def asked_for(model: nn.Module) -> None:
    made = torch.autograd.grad(model(**batch()), [*model.parameters()], allow_unused=True)
    norm = nn.utils.get_total_norm([gradient for gradient in made if gradient is not None]).item()
    for parameter, gradient in zip(model.parameters(), made, strict=True):
        parameter.grad = gradient
    assert nn.utils.get_total_norm(gradients(model)).item() == norm


def normalized(model: nn.Module) -> None:
    """Each one, as far as their ranks have all of it."""
    model(**batch()).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / parameter.grad.norm()


def begun_with_zeros(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "unused" else torch.zeros_like(parameter)
    model(**batch()).backward()


CHANGES: list[Callable[[nn.Module], None]] = [halved, combined, asked_for, begun_with_zeros, normalized]


def changed(
    limits: dict[str, Any] | None, change: Callable[[nn.Module], None]
) -> tuple[list[float], dict[str, Tensor]]:
    """Norms and weights of steps with gradients that the script itself has put into ``.grad``."""
    model: nn.Module = build() if limits is None else parallel(limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    found = []
    for _ in range(3):
        change(model)
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert kept and not any(isinstance(value, norms.Share) for value in kept)
    return found, model.state_dict()


def all_changed(limits: dict[str, Any] | None) -> list[tuple[list[float], dict[str, Tensor]]]:
    whole = limits is None or limits == PP
    return [changed(limits, change) for change in CHANGES[: None if whole else -1]]


@pytest.mark.parametrize("limits", PLANS, ids=str)
def test_what_a_script_makes_of_gradients_is_clipped_as_the_plain_models(limits: dict[str, Any]) -> None:
    expected = all_changed(None)
    for ranks in launch(all_changed, 2, limits):
        for (norms_found, weights), (norms_expected, state) in zip(ranks, expected, strict=False):
            assert norms_found == pytest.approx(norms_expected, rel=1e-9)
            torch.testing.assert_close(weights, dict(state), rtol=1e-9, atol=1e-12)


HANDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "squares": lambda own: sum(gradient.pow(2).sum() for gradient in own),
    "norms": lambda own: sum(gradient.norm().item() ** 2 for gradient in own),
    "vector": lambda own: torch.cat([gradient.view(-1) for gradient in own]).norm(),
}


def by_hand(limits: dict[str, Any], way: str) -> list[str]:
    model = parallel(limits)
    optimizer = torch.optim.Adafactor if limits == PP else torch.optim.AdamW
    steps = optimizer(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            steps.step()
        assert not [item for item in caught if "own part of the model" in str(item.message)]
        assert all(gradient.view(-1).shape == (gradient.numel(),) for gradient in gradients(model))
        HANDS[way](gradients(model))
    return [str(item.message) for item in caught if "own part of the model" in str(item.message)]


@pytest.mark.parametrize(
    ("limits", "way"), [(PP, "squares"), (PP, "norms"), (PP, "vector"), (TP, "squares"), (TP, "vector")]
)
def test_norms_added_up_by_hand_are_told_of(limits: dict[str, Any], way: str) -> None:
    for told in launch(by_hand, 2, limits, way):
        assert len(told) == 1 and "model.clip_grad_norm_" in told[0]


DECISIONS: list[Callable[[Tensor], Tensor]] = [
    lambda gradient: torch.isfinite(gradient).all(),
    lambda gradient: ~gradient.isnan().any(),
    lambda gradient: ~torch.any(~torch.isfinite(gradient) | gradient.isinf()),
    lambda gradient: gradient.abs().max() < 1e9,
]


def decided(limits: dict[str, Any]) -> list[list[str]]:
    """Of a step that a script leaves out where a gradient is not finite, which only some ranks see."""
    found = []
    for finite in DECISIONS:
        model = parallel(limits)
        model(**batch()).backward()
        own, rank = gradients(model), torch.distributed.get_rank()
        if rank:
            own[0].view(-1)[0] = math.nan
        own[-1].masked_fill_(torch.isnan(own[-1]), 1.0)  # element by element it is the same on all ranks
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [bool(finite(gradient)) for gradient in own] == [not rank or bool(at) for at in range(len(own))]
        found.append([str(item.message) for item in caught if "own part of the model" in str(item.message)])
        assert not caught or caught[0].filename == __file__
        assert nn.utils.get_total_norm(own).isnan()
    return found


@pytest.mark.parametrize("limits", [PP, TP, {"pp": 1, "dp": 2, "tp": 1, "zero": 3}], ids=str)
def test_what_ranks_decide_by_their_own_gradients_is_told_of(limits: dict[str, Any]) -> None:
    for found in launch(decided, 2, limits):
        assert all(len(told) == 1 and "finite only where all gradients are" in told[0] for told in found)


def decided_by_replicas() -> None:
    model = parallel({"pp": 1, "dp": 2, "tp": 1})
    model(**batch()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(bool(finite(gradient)) for finite in DECISIONS for gradient in gradients(model))


def test_replicas_have_all_gradients_to_decide_by() -> None:
    launch(decided_by_replicas, 2)

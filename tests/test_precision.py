"""Float64 throughout: no float32 is left in what is computed or captured, and other models are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.precision import eager_in_float64, float64_throughout
from autopart.tracing import capture
from families import FAMILIES, Family, family


class Narrow(TorchDispatchMode):
    """Collects the ops that return float32 tensors with more than one element."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.dim() > 0:
            self.found.add(str(func))
        return out


@pytest.mark.parametrize("item", FAMILIES, ids=str)
def test_no_float32_is_computed(item: Family) -> None:
    model, inputs = item.build(), item.inputs(2)
    with eager_in_float64(model), Narrow() as narrow:
        loss = model(**inputs).loss
        loss.backward()
    assert loss.dtype == torch.float64 and not narrow.found


def test_without_it_the_loss_is_narrowed() -> None:
    item = family("gpt2")
    with Narrow() as narrow:
        loss = item.build()(**item.inputs(2)).loss
    assert loss.dtype == torch.float32 and narrow.found


@pytest.mark.parametrize("item", FAMILIES, ids=str)
def test_no_float32_is_captured_and_the_graph_computes_the_same(item: Family) -> None:
    model, inputs = item.build(), item.inputs(2)
    with float64_throughout():
        exported = torch.export.export(model, (), inputs, strict=False)
    assert "f32[" not in exported.graph_module.print_readable(print_output=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured = exported.module()(**inputs).loss
    model.load_state_dict(before)  # batch norm counted the batch
    with eager_in_float64(model):
        torch.testing.assert_close(captured, model(**inputs).loss, rtol=1e-12, atol=0)


def test_experts_and_precision_come_back() -> None:
    model = family("mixtral").build()
    with pytest.raises(ZeroDivisionError), eager_in_float64(model):
        assert torch.ones(1).float().dtype == torch.float64
        raise ZeroDivisionError
    config: Any = model.config
    assert config._experts_implementation == "grouped_mm" and torch.ones(1).float().dtype == torch.float32


def test_a_float32_model_is_left_alone() -> None:
    item = family("mixtral", dtype=torch.float32)
    model, inputs = item.build(), item.inputs(2)
    with eager_in_float64(model):
        loss = model(**inputs).loss
    assert torch.equal(loss, model(**inputs).loss) and loss.dtype == torch.float32


def test_the_least_number_of_float64_becomes_a_tensor() -> None:
    least = torch.finfo(torch.float64).min
    with float64_throughout():
        assert torch.tensor(least).item() == torch.full((), least).item() == least
        assert torch.tensor(3).dtype == torch.int64


def test_tensors_that_a_model_keeps_outside_of_its_state_are_captured() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = torch.linspace(0.1, 1.0, 4)  # no buffer, so that double() leaves it

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale.to(x)).square().mean()

    model = Scaled().double()
    with float64_throughout():
        program = capture(model, (torch.randn(8, 4, dtype=torch.float64),), check_eval=False)
    (constant,) = program.constants.values()
    assert constant.dtype == torch.float32 and torch.equal(constant, model.scale)

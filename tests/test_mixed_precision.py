"""Autocast written out in the graph, autocast around the call, and loss scaling in float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.runtime.errors import CaptureError, InputError
from launch import launch
from two_layers import DP, NAMES, PP

BF16, FP16 = torch.bfloat16, torch.float16


class Mixed(nn.Module):
    """Ops of all of autocast's kinds: narrow, float32, promoting, composed of others, and left alone."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.words = nn.Embedding(16, 32)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.first, self.second = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 16)

    def block(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", self.query(x), self.key(x))
        x = x + torch.softmax(scores * 0.1, -1) @ x
        with torch.autocast("cpu", enabled=False):
            scale = 1.0 + self.norm.weight.float().square().mean()
        hidden = F.gelu(self.first(self.norm(x)))
        return torch.cat([self.second(hidden) * scale, x], -1)[..., :32] + x

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.words(x)
        if self.inside:
            with torch.autocast("cpu", BF16):
                x = self.block(x)
        else:
            x = self.block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "logits": logits}


def build(inside: bool = False) -> Mixed:
    torch.manual_seed(0)
    return Mixed(inside)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(16, (8, 6), generator=generator) for name in "xy"}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def serially(dtype: torch.dtype | None, inside: bool = False) -> Any:
    model = build(inside)
    with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
        out = model(**batch())
    out["loss"].backward()
    return out, gradients(model)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, in parts of each tensor's largest number."""
    return max(
        ((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3)).item()
        for name in found
    )


@pytest.mark.parametrize(("dtype", "inside"), [(BF16, False), (FP16, False), (None, True), (BF16, True)])
def test_what_autocast_casts_is_written_out(dtype: torch.dtype | None, inside: bool) -> None:
    expected, made = serially(dtype, inside)
    precision = {BF16: "bf16-mixed", FP16: "fp16-mixed", None: ""}[dtype]
    model = autopart.parallelize(build(inside), precision=precision, outputs="all", verbose=False)
    out = model(**batch())
    assert torch.equal(out["loss"], expected["loss"]) and torch.equal(out["logits"], expected["logits"])
    out["loss"].backward()
    assert {tensor.dtype for tensor in gradients(model).values()} == {torch.float32}
    # uses of a narrow value are added up in another order
    assert distance(gradients(model), made) < 4 * torch.finfo(dtype or BF16).eps


def test_autocast_around_the_call_is_the_precision() -> None:
    expected, _ = serially(BF16)
    model: Any = autopart.parallelize(build(), outputs="all", verbose=False)
    with torch.autocast("cpu", BF16):
        out = model(**batch())
    assert model.parallel.manifest.precision == "bf16-mixed"
    assert torch.equal(out["logits"], expected["logits"])
    out["loss"].backward()
    with torch.autocast("cpu", FP16), pytest.raises(InputError, match=r"torch.float16.*captured in bf16-mixed"):
        model(**batch())
    plain = autopart.parallelize(build(), verbose=False)
    plain(**batch())
    with torch.autocast("cpu", BF16), pytest.raises(InputError, match="captured without it"):
        plain(**batch())


def test_names_of_precisions() -> None:
    with pytest.raises(CaptureError, match="bf16-mixed, fp16-mixed, or ''"):
        autopart.capture(build(), (), batch(), precision="half")
    with pytest.raises(CaptureError, match="no meta device"):
        autopart.capture(build().to("meta"), (), batch(), precision="bf16-mixed")
    program = autopart.capture(build(), (), batch(), precision="bf16-mixed")
    plan = autopart.make_plan(program, autopart.Cluster.local(1))
    assert plan.dtype == "bf16-mixed"
    assert program.fingerprint != autopart.capture(build(), (), batch()).fingerprint


def in_parallel(limits: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model = autopart.parallelize(build(), precision="bf16-mixed", verbose=False, **limits)
    loss = model(**batch())["loss"]
    loss.backward()
    return loss.item(), gradients(model)


def test_bf16_in_parallel_is_as_near_as_the_rounding_of_bf16() -> None:
    """Parts of sums are rounded where one process rounds the whole; the yardstick is what rounding does to that."""
    exact, expected = serially(BF16)
    wide, unrounded = serially(None)
    rounding, shift = distance(expected, unrounded), abs((exact["loss"] - wide["loss"]).item())
    assert 1e-3 < rounding < 0.05
    for limits in (PP, {"tp": 2}, {**DP, "microbatches": 2}):
        for loss, found in launch(in_parallel, 2, limits):
            assert abs(loss - exact["loss"].item()) <= shift
            assert distance(found, expected) <= rounding, limits


# --- Loss scaling ---


class Steep(nn.Module):
    """The first layer's output is narrow and scaled up, so that its gradients are the first to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x) * 64.0)).float(), y)


def scaled(limits: dict[str, Any] | None, first_scale: float = 2.0**18) -> tuple[list[float], dict[str, Tensor]]:
    """Eight steps as torch's documentation writes them: the scale after each, and the weights."""
    torch.manual_seed(0)
    model: nn.Module = Steep()
    if limits is not None:
        model = autopart.parallelize(model, precision="fp16-mixed", verbose=False, **limits)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=3)
    scales = []
    for _ in range(8):
        with torch.autocast("cpu", FP16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@pytest.mark.parametrize("limits", [{}, {**PP, "pins": {"second": 1}}, DP], ids=["one", NAMES[0], NAMES[2]])
@pytest.mark.parametrize("first_scale", [2.0**22, 2.0**8])
def test_grad_scaler_s_protocol(limits: dict[str, Any], first_scale: float) -> None:
    scales, weights = scaled(None, first_scale)
    assert first_scale == 2.0**8 or scales[0] < first_scale, "it begins with overflows"
    assert scales[-1] > min(scales), "and grows again"
    for found, state in launch(scaled, 2 if limits else 1, limits, first_scale):
        assert found == scales
        for name, tensor in weights.items():
            torch.testing.assert_close(state[name], tensor, rtol=5e-3, atol=5e-3)

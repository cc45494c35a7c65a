"""Peaks of models in which one op decides: what torch copies for it, and makes on its way back, against real steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.api import load
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.realize import realize, realized
from autopart.step_memory import step_peaks
from autopart.tracing import capture
from autopart.verify.live_bytes import LiveBytes, scattering_in_sight
from clusters import ideal
from launch import launch


class _WrittenOut(nn.Module):
    """Attention by einsum, whose operands are copied where their dims do not merge, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (item(x).view(x.shape[0], 16, 4, 16) for item in (self.query, self.key, self.value))
        weights = torch.softmax(torch.einsum("blhd,bmhd->bhlm", q, k), -1)
        return x + torch.einsum("bhlm,bmhd->blhd", self.drop(weights), v).reshape(x.shape)


class _Crossing(nn.Module):
    """torch's own attention to another sequence: the tensors that are projected are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x[:, ::2])
        return x + self.attention(x, memory, memory, need_weights=False)[0]


class _Gated(nn.Module):
    """Gates of channels, whose gradients are as large as what they multiply until they are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + x * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))


class _Outer(nn.Module):
    """An einsum without sums, which is a multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.exp(-torch.einsum("bld,dn->bldn", x, self.decay).cumsum(1)).sum(-1)


class _Scan(nn.Module):
    """States one after the other, whose readouts are written into the code of their stack, so that they run last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.read = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        read = self.read(x)
        gates = torch.exp(-self.gate(x).unsqueeze(-1) * read.unsqueeze(2))
        state, found = torch.zeros_like(gates[:, 0]), []
        for index in range(x.shape[1]):
            state = gates[:, index] * state + x[:, index].unsqueeze(-1)
            found.append(torch.matmul(state, read[:, index].unsqueeze(-1))[:, :, 0])
        return x + torch.stack(found, 1)


class _Directed(nn.Module):
    """A weight of direction and scale, one of each place along a dim or of all; nothing keeps the product."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(64, 64, 32, bias=False)
        nn.utils.parametrizations.weight_norm(self.inner, dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner.weight.sum((0, 2))


class _Cell(nn.Module):
    """A cell that torch writes out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 64)
        return self.cell(rows, torch.tanh(rows)).reshape(x.shape)


class _Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.ones_like(x))


def _most(directory: str, weights: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> int:
    model = load(directory, dict(weights), device=torch.device("cpu")).train()
    found = []
    with scattering_in_sight(), LiveBytes([*model.parameters(), *model.buffers(), *leaves.values()]) as live:
        for _ in range(6):
            live.most = live.now
            model(**leaves)
            found.append(live.most)
    return min(found[1:])  # a thread of gloo may hold a message for a moment longer, on a busy machine in several calls


def _check(
    model: nn.Module,
    given: Tensor | dict[str, Tensor],
    folder: Path,
    rel: float,
    precision: str = "",
    **limits: Any,
) -> None:
    """Predicted and counted peaks of all ranks."""
    leaves = {"x": given} if isinstance(given, Tensor) else given
    program = capture(model, (), leaves, precision=precision, check_eval=False)
    analysis = analyze(program)
    pp, ranks = limits.get("pp", 1), math.prod(limits.get(axis, 1) for axis in ("pp", "dp", "tp"))
    known: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 2, "recompute": "none", **limits}
    plan = make_plan(program, ideal(ranks), batch=8, analysis=analysis, **known)
    realize(program, plan, analysis).save(folder)
    counted = launch(_most, ranks, str(folder), model.state_dict(), leaves)
    predicted = [peak.call for peak in step_peaks(analysis, plan, realized(analysis, plan), "cpu")]
    size = ranks // pp
    assert predicted == pytest.approx([max(counted[size * i : size * (i + 1)]) for i in range(pp)], rel=rel)


@pytest.mark.parametrize("again", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("layer", [_WrittenOut, _Crossing, _Gated, _Outer, _Scan])
def test_peak_where_an_op_decides(layer: Callable[[], nn.Module], again: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Model(layer), torch.randn(8, 16, 64), tmp_path / "program", 0.03, recompute=again)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_weight_norm_keeps_no_product(dim: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Model(lambda: _Directed(dim)), torch.randn(8, 16, 64), tmp_path / "program", 0.03)


def test_cells_let_go_of_their_gates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Model(_Cell), torch.randn(8, 16, 64), tmp_path / "program", 0.03)


class _States(nn.Module):
    def __init__(self, inner: nn.GRU) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class _Single(nn.Module):
    """An op on a tensor that nothing else keeps."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64) + 0.5)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(x * self.scale) * 1.5).mean()


SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    # formulas of backwards that make tensors on their way
    "rsqrt": torch.rsqrt,
    "erf": torch.erf,
    "square": lambda x: x * x,
    "std": lambda x: x.std(-1),
    "cumprod": lambda x: x.cumprod(1),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "distances": lambda x: (x.unsqueeze(1) - x.unsqueeze(2)).square().sum(-1),
    # gradients that are views: of a sum one with more dims than memory
    "sum": lambda x: torch.sigmoid(x).sum(1),
    "stack": lambda x: torch.stack([torch.relu(x), torch.tanh(x)], 1),
    # ops that torch writes out
    "normalize": lambda x: F.normalize(x, dim=-1),
    "rms_norm": lambda x: F.rms_norm(x, [64]),
    "einsum_of_three": lambda x: torch.einsum("bld,de,bme->blm", x, torch.ones(64, 64), x),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=32, dim=1),
    "gru": _States(nn.GRU(64, 64, batch_first=True)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_peak_of_a_single_op(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Single(SINGLE[name]), torch.rand(8, 32, 64) + 0.2, tmp_path / "program", 0.01)


class _Rays(nn.Module):
    """Outside of layers; statements that gather weights are longer, so that more values have names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = F.relu(first(torch.cat([x.sin(), x.cos()], -1).flatten(-2)))
        for layer in others:
            x = F.relu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("level", [1, 3])
def test_peak_where_names_hang_on_what_is_gathered(level: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Rays(), torch.randn(8, 64, 8, 8), tmp_path / "program", 0.02, dp=2, zero=level)


class _Scaled(nn.Module):
    """Queries are scaled first, and a view of that has a name, which holds it until the layer is done."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(64, 64), nn.Linear(64, 256)
        self.back = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        query = (self.query(x) * 0.25).view(x.shape[0], 16, 4, 16).transpose(1, 2)
        heads = query.contiguous().sin().transpose(1, 2).reshape(x.shape) * query.sum((1, 3)).unsqueeze(-1)
        return x + self.back(F.gelu(self.out(heads)))


def test_peak_where_a_view_has_a_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Model(_Scaled), torch.randn(8, 16, 64), tmp_path / "program", 0.02, recompute="full")


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv1d(64, 256, 8, stride=8), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.patches(x)).transpose(1, 2)).float().square().mean()


def test_convolutions_keep_casts_of_weights(tmp_path: Path) -> None:
    """Also the first, whose input has no gradient."""
    torch.manual_seed(0)
    _check(_Patches(), torch.randn(8, 64, 32), tmp_path / "program", 0.02, precision="bf16-mixed")


class _Turned(nn.Module):
    """What its convolutions hand on lies transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_what_is_not_contiguous_is_sent_as_a_copy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    limits: dict[str, Any] = {"pp": 2, "microbatches": 4, "schedule": "gpipe"}
    _check(_Turned(), torch.randn(8, 64, 16), tmp_path / "program", 0.02, **limits)


class _Joined(nn.Module):
    """The second stage receives two tensors, whose gradients are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Conv1d(16, 32, 3, padding=1), nn.Conv1d(32, 128, 3, padding=1)
        self.narrow = nn.Conv1d(160, 8, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.narrow(torch.cat([x, self.wide(x)], 1)).square().mean()


def test_gradients_that_are_parts_are_copied_to_be_sent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    limits: dict[str, Any] = {"pp": 2, "microbatches": 4, "schedule": "zb-h1"}
    _check(_Joined(), torch.randn(8, 16, 64), tmp_path / "program", 0.02, **limits)


class _Neighbours(nn.Module):
    """Numbers of rows that are seen in more dims, of which a rank's part is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = (x[..., :1] > 0).long().expand(-1, -1, 64)
        for layer in self.layers:
            x = torch.tanh(layer(x.gather(1, order)))
        return x.mean()


def test_parts_of_what_is_expanded_are_dense(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check(_Neighbours(), torch.randn(8, 64, 64), tmp_path / "program", 0.02, tp=2)


def test_a_head_that_is_gathered_for_itself(tmp_path: Path) -> None:
    """Outside of layers a weight is gathered where it is read, and its gradient not put off."""
    sizes = "num_hidden_layers=1&hidden_size=64&intermediate_size=128&num_attention_heads=2&vocab_size=2048"
    loaded = load_model(f"hf:phi?{sizes}&batch=8&seq=32")
    _check(loaded.model.train(), dict(loaded.kwargs), tmp_path / "program", 0.03, dp=2, tp=2, zero=3)

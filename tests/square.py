"""Products panel by panel on four local processes, for tests: light to import, since every process does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.runtime.local_forms import summa_addmm, summa_linear, summa_matmul
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Placement, take_share
from autopart.runtime.traffic import Traffic

Q = 2
B, S, K, N = 3, 4, 8, 12
TOKENS = B * S
PAIRS: dict[str, tuple[Any, Any, list[tuple[int, ...]], list[str], int]] = {
    "linear": (summa_linear, F.linear, [(B, S, K), (N, K), (N,)], ["S1 S2", "S1 S0", "R S0"], 1),
    "no bias": (summa_linear, F.linear, [(B, S, K), (N, K)], ["S1 S2", "S1 S0"], 1),
    "fused": (summa_linear, F.linear, [(B, S, K), (N, K), (N,)], ["S1 S2", "S1 S0/3", "R S0/3"], 1),
    "addmm": (summa_addmm, torch.addmm, [(N,), (TOKENS, K), (K, N)], ["R S0", "S0/3 S1", "S0 S1"], 2),
    "full bias": (summa_addmm, torch.addmm, [(TOKENS, N), (TOKENS, K), (K, N)], ["S0 S1", "S0 S1", "S0 S1"], 2),
    "matmul": (summa_matmul, torch.matmul, [(B, S, K), (K, N)], ["S1 S2", "S0 S1"], 1),
}
RESULTS = {"fused": "S1 S2/3", "addmm": "S0/3 S1", "full bias": "S0 S1"}


def parsed(text: str) -> tuple[Placement, ...]:
    return tuple(map(Placement.parse, text.split()))


def operands(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an op returns inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def on_a_square(name: str) -> tuple[list[Tensor], dict[Any, Any], int]:
    """This rank's share of the result and of the gradients, the traffic, and the largest tensor inside."""
    form, _, shapes, texts, _ = PAIRS[name]
    mesh = dist.device_mesh.DeviceMesh("cpu", torch.arange(4).reshape(Q, Q), mesh_dim_names=("x", "y"))
    place = divmod(dist.get_rank(), Q)
    traffic = Traffic()
    rows, columns = (Axis(n, Q, i, mesh.get_group(n), traffic) for n, i in zip("xy", place, strict=True))
    whole = operands(shapes)
    shares = [
        take_share(tensor, parsed(text), (Q, Q), place).contiguous().requires_grad_()
        for tensor, text in zip(whole, texts, strict=True)
    ]
    with Largest() as largest:
        result = form(*shares, rows=rows, columns=columns)
        seed = torch.ones_like(result) * (1 + dist.get_rank())
        gradients = torch.autograd.grad(result, shares, seed)
    counts = {(op, axis, phase): (c.calls, c.bytes) for (op, axis, phase), c in traffic.counts().items()}
    return [result.detach(), *gradients], counts, largest.elements

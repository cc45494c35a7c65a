"""Ops that real models use, as their functions are called: each is captured, has rules, and can be sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopart.cut_order import is_sharded
from autopart.passes import graph as graphs
from autopart.passes.rules import RULES, name_of, strategies
from autopart.tracing import capture

PLACES = torch.arange(8)

# On ``[8, 8, 16]`` and, for pictures, ``[8, 8, 4, 4]``.
ON_ROWS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "baddbmm": lambda x: torch.baddbmm(x @ x.transpose(1, 2), x, x.transpose(1, 2)),
    "matmul": lambda x: torch.matmul(x, x.transpose(1, 2)),
    "linear": lambda x: F.linear(x, torch.ones(8, 16, dtype=x.dtype)),
    "conv1d": lambda x: F.conv1d(x, torch.ones(4, 8, 3, dtype=x.dtype)),
    "conv_transpose1d": lambda x: F.conv_transpose1d(x, torch.ones(8, 4, 3, dtype=x.dtype)),
    "group_norm": lambda x: F.group_norm(x, 4),
    "layer_norm": lambda x: F.layer_norm(x, [16]),
    "rms_norm": lambda x: F.rms_norm(x, [16]),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8)),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "topk": lambda x: x.topk(2)[0],
    "sort": lambda x: x.sort()[0],
    "gather": lambda x: x.gather(2, PLACES.expand(x.size(0), 8, 8)),
    "scatter": lambda x: x.scatter(2, PLACES.expand(x.size(0), 8, 8), 0.5),
    "index": lambda x: x[:, PLACES.flip(0)],
    "index_put": lambda x: x.transpose(0, 1).index_put((PLACES,), -x.transpose(0, 1)),
    "cumsum": lambda x: x.cumsum(1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "split": lambda x: x.split([4, 12], 2),
    "chunk": lambda x: x.chunk(2, 2),
    "unbind": lambda x: x.unbind(1),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "tril": lambda x: x.reshape(-1, 2, 8, 8).tril(),
    "triu": lambda x: x.reshape(-1, 2, 8, 8).triu(),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(2),
    "permute": lambda x: x.permute(0, 2, 1),
    "flatten": lambda x: x.flatten(1),
    "norm": lambda x: x.norm(dim=-1),
    "var": lambda x: x.var(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(0, 1), x.argmax(-1).flatten(), reduction="sum"),
    "nll_loss": lambda x: F.nll_loss(x.flatten(0, 1), x.argmax(-1).flatten(), reduction="sum"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() + 1, reduction="sum"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid(), reduction="sum"),
    "kl_div": lambda x: F.kl_div(x, x.detach().sigmoid(), reduction="sum"),
    "embedding": lambda x: F.embedding(x.argmax(-1), torch.ones(16, 8, dtype=x.dtype)),
    "one_hot": lambda x: F.one_hot(x.argmax(-1), 16) * x,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: F.dropout(x, 0.5),
}
ON_PICTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "conv2d": lambda x: F.conv2d(x, torch.ones(4, 8, 3, 3, dtype=x.dtype)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(8, 4, 3, 3, dtype=x.dtype)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
}
CORE = {"chunk": "split_with_sizes", "flatten": "reshape", "interpolate": "upsample_nearest2d"}
"""By what the op is called in a graph, where it has another name than its function."""
RECURRENT = ("LSTM", "GRU")
ON_SAMPLES_ONLY = {*RECURRENT}
"""What is computed whole on every rank of a tensor axis; the batch is split."""


class Census(nn.Module):
    """Every op in a module of its own, so that its nodes are told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.calls = nn.ModuleDict({f"{name}_": Call(call) for name, call in {**ON_ROWS, **ON_PICTURES}.items()})
        self.recurrent = nn.ModuleDict({name: getattr(nn, name)(16, 4, batch_first=True) for name in RECURRENT})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        results = [self.calls[f"{name}_"](x) for name in ON_ROWS]
        results += [self.calls[f"{name}_"](x.reshape(-1, 8, 4, 4)) for name in ON_PICTURES]
        results += [module(x)[0] for module in self.recurrent.values()]
        flat = [item for result in results for item in (result if isinstance(result, tuple) else (result,))]
        return torch.stack([item.sum() for item in flat]).sum()


class Call(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.call(x)


def test_every_op_has_rules_and_is_sharded_unless_it_says_so() -> None:
    program = capture(Census(), (torch.randn(8, 8, 16),), check_eval=False)
    assert not program.static_batch  # else samples would be sharded like any dim
    offered = strategies(program.graph, 2)
    found: dict[str, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if graphs.is_op(node):
            assert name_of(node) in RULES.entries, name_of(node)
            part = graphs.module_path(node).split(".")
            if part[0] in ("calls", "recurrent"):
                found.setdefault(part[1].rstrip("_"), []).append(node)
    assert found.keys() == {*ON_ROWS, *ON_PICTURES, *RECURRENT}
    whole = set()
    for name, nodes in found.items():
        own = [node for node in nodes if RULES.rule(node) is not None]
        assert own == nodes, f"{name}: {[name_of(node) for node in nodes if node not in own]} has no rule here"
        core = [node for node in nodes if CORE.get(name, name.lower()) in name_of(node)]
        assert core, f"{name}: {[name_of(node) for node in nodes]}"
        if not any(is_sharded(item) for node in core for item in offered[node]):
            whole.add(name)
    assert whole == ON_SAMPLES_ONLY

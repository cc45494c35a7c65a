"""The planner's prices against measured steps of a Llama on one node's tensor, data and pipeline ranks.

    python benchmarks/published_llama.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/nanotron_llama.csv``, eager PyTorch on 8 H100: captured without weights and priced
by ``make_plan`` with the published degrees, microbatches and layers on each stage, all activations kept, sequence
parallelism on the tensor ranks and the optimizer's states in shares (ZeRO-1). Nothing was fitted to them, and memory is
not asked, as all ran. The model is written out here, as its norms ran in one kernel, which transformers' do not. What
the host takes is that of another engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional

import published_rows
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost.published import read_table
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change

TABLE = "nanotron_llama"
LAYERS, WIDTH, MLP, HEADS, VOCABULARY, SEQUENCE, BATCH = 24, 2048, 4096, 32, 50257, 4096, 1024


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            made(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, heads, sequence, size] by cos and sin [sequence, size / 2]."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm = nn.RMSNorm(WIDTH), Attention(), nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, MLP, bias=False), nn.Linear(WIDTH, MLP, bias=False)
        self.down = nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        read = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(read)) * self.up(read))


class Llama(nn.Module):
    """Tokens and labels [batch, sequence] to the mean cross entropy in float32; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(SEQUENCE, WIDTH // HEADS // 2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. layers: of each stage."""

    dp: int
    tp: int
    pp: int
    samples: int
    layers: str
    measured_s: float
    predicted_s: float


def analysis() -> Analysis:
    with torch.device("meta"):
        model = Llama().bfloat16()
        tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
    return analyze(capture(model, (tokens, tokens), {}, check_eval=False))


def priced(found: Analysis, row: dict[str, str]) -> Priced:
    dp, tp, pp, samples = (int(row[name]) for name in ("dp", "tp", "pp", "samples"))
    stages = [stage for stage, count in enumerate(row["layers"].split()) for _ in range(int(count))]
    plan = make_plan(
        found.program,
        Change(memory=4.0).applied(Cluster.parse("8xH100")),
        analysis=found,
        batch=BATCH,
        pp=pp,
        dp=dp,
        tp=tp,
        tensor_scheme="sp" if tp > 1 else "auto",
        microbatches=BATCH // dp // samples,
        pins={f"layers.{layer}": stage for layer, stage in enumerate(stages)} if pp > 1 else None,
        recompute="none",
        meshes="equal",
        zero=1,
    )
    return Priced(dp, tp, pp, samples, row["layers"], float(row["seconds"]), plan.step_time_s)


def report(rows: list[Priced]) -> None:
    cells = [
        (
            *(f"dp {row.dp} tp {row.tp} pp {row.pp}", row.samples, row.layers),
            *(f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{published_rows.error(row):+.1%}"),
        )
        for row in rows
    ]
    headers = ("plan", "samples", "layers", "measured s", "predicted s", "error")
    print(tabulate(cells, headers=headers, disable_numparse=True))
    off, middle, correlation = published_rows.summary(rows)
    print(f"\nmean |error| {off}, median error {middle}, rank correlation {correlation}")


def main() -> None:
    options = published_rows.parser(__doc__, "degrees, as dp 4 tp 2 pp 1,").parse_args()
    found = analysis()
    chosen = [
        row for row in read_table(TABLE) if options.only in f"dp {row['dp']} tp {row['tp']} pp {row['pp']}"
    ]  # fmt: skip
    published_rows.show([priced(found, row) for row in chosen], options.json, report)


if __name__ == "__main__":
    main()

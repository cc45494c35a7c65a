"""The planner's prices against measured steps of a Llama on one node's tensor, data and pipeline ranks.

    python benchmarks/published_llama.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/nanotron_llama.csv``, eager PyTorch on 8 H100, and of ``nanotron_tensor.csv``, a
larger one on 2 to 32 tensor ranks: captured without weights and priced by ``make_plan`` with the published degrees,
microbatches and layers on each stage, all activations kept, sequence parallelism on the tensor ranks (or sums, where
that table says so) and the optimizer's states in shares (ZeRO-1). Nothing was fitted to them, and memory is
not asked, as all ran. The model is written out here, as its norms ran in one kernel, which transformers' do not. What
the host takes is that of another engine.
"""

from __future__ import annotations

import functools
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

TABLES = ("nanotron_llama", "nanotron_tensor")
SEQUENCE, BATCH, NODE = 4096, 1024, 8


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    width: int
    mlp: int
    heads: int
    vocabulary: int


SIZES = {"nanotron_llama": Sizes(24, 2048, 4096, 32, 50257), "nanotron_tensor": Sizes(28, 3072, 8192, 32, 131072)}


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, width = sizes.heads, sizes.width
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            made(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for made in (self.query, self.key, self.value)
        )
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, heads, sequence, size] by cos and sin [sequence, size / 2]."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, mlp = sizes.width, sizes.mlp
        self.norm, self.attention, self.mlp_norm = nn.RMSNorm(width), Attention(sizes), nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, mlp, bias=False), nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        read = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(read)) * self.up(read))


class Llama(nn.Module):
    """Tokens and labels [batch, sequence] to the mean cross entropy in float32; the head is tied to the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(SEQUENCE, sizes.width // sizes.heads // 2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. scheme: of its tensor ranks. layers: of each stage."""

    table: str
    dp: int
    tp: int
    pp: int
    samples: int
    scheme: str
    layers: str
    measured_s: float
    predicted_s: float


@functools.cache
def analysis_of(table: str) -> Analysis:
    with torch.device("meta"):
        model = Llama(SIZES[table]).bfloat16()
        tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
    return analyze(capture(model, (tokens, tokens), {}, check_eval=False))


def priced(table: str, row: dict[str, str]) -> Priced:
    dp, tp, pp, samples = (int(row[name]) for name in ("dp", "tp", "pp", "samples"))
    stages = [stage for stage, count in enumerate(row["layers"].split()) for _ in range(int(count))]
    analysis, scheme = analysis_of(table), row.get("scheme") or ("sp" if tp > 1 else "auto")
    batch, gpus = int(row.get("batch") or BATCH), dp * tp * pp
    plan = make_plan(
        analysis.program,
        Change(memory=4.0).applied(Cluster.parse(f"{max(1, gpus // NODE)}x{min(NODE, gpus)}xH100")),
        analysis=analysis,
        batch=batch,
        pp=pp,
        dp=dp,
        tp=tp,
        tensor_scheme=scheme,
        microbatches=batch // dp // samples,
        pins={f"layers.{layer}": stage for layer, stage in enumerate(stages)} if pp > 1 else None,
        recompute="none",
        meshes="equal",
        zero=1,
    )
    return Priced(table, dp, tp, pp, samples, scheme, row["layers"], float(row["seconds"]), plan.step_time_s)


def report(rows: list[Priced]) -> None:
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        cells = [
            (
                *(f"dp {row.dp} tp {row.tp} pp {row.pp}", row.scheme, row.samples, row.layers),
                *(f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{published_rows.error(row):+.1%}"),
            )
            for row in own
        ]
        headers = ("plan", "scheme", "samples", "layers", "measured s", "predicted s", "error")
        print(f"{table}\n\n" + tabulate(cells, headers=headers, disable_numparse=True))
        off, middle, correlation = published_rows.summary(own)
        print(f"\nmean |error| {off}, median error {middle}, rank correlation {correlation}\n")


def main() -> None:
    options = published_rows.parser(__doc__, "table and degrees, as nanotron_llama dp 4 tp 2 pp 1,").parse_args()
    rows = [
        priced(table, row)
        for table in TABLES
        for row in read_table(table)
        if options.only in f"{table} dp {row['dp']} tp {row['tp']} pp {row['pp']}"
    ]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()

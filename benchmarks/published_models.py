"""The planner's prices against measured steps of plain PyTorch models: fully sharded data parallelism on A100 and H100.

    python benchmarks/published_models.py [--only TEXT] [--every N] [--json]

The rows of ``autopart/cost/published/mpt_fsdp.csv``, a GPT with fused attention in bfloat16, and of
``torchtitan_fsdp.csv`` and ``pytorch_fsdp.csv``, transformers' Llamas and GPT-2: captured without weights and priced by
``make_plan`` with the published batch, microbatches, recomputation and weights divided over all GPUs (ZeRO-3). Nothing
was fitted to them, and memory is not asked, as all ran. Beside it what one constant says: the median FLOP/s of a
table's rows on that device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import mean, median

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional

import published_rows
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost.published import read_table
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change
from pre_norm import Block

SIZES = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width and heads (scripts/train/yamls/pretrain of the same repository)."""
LLAMAS = {
    "llama3-70b": (
        "num_hidden_layers=80&hidden_size=8192&intermediate_size=28672&num_attention_heads=64"
        "&num_key_value_heads=8&vocab_size=128256"
    ),
    "llama2-70b": (
        "num_hidden_layers=80&hidden_size=8192&intermediate_size=28672&num_attention_heads=64"
        "&num_key_value_heads=8&vocab_size=32000"
    ),
    "llama2-13b": (
        "num_hidden_layers=40&hidden_size=5120&intermediate_size=13824&num_attention_heads=40"
        "&num_key_value_heads=40&vocab_size=32000"
    ),
    "llama2-7b": (
        "num_hidden_layers=32&hidden_size=4096&intermediate_size=11008&num_attention_heads=32"
        "&num_key_value_heads=32&vocab_size=32000"
    ),
    "codellama-34b": (
        "num_hidden_layers=48&hidden_size=8192&intermediate_size=22016&num_attention_heads=64"
        "&num_key_value_heads=8&vocab_size=32000"
    ),
}
GPTS = {"gpt-175b": "n_layer=96&n_embd=12288&n_head=96&vocab_size=50000&bos_token_id=0&eos_token_id=0"}
TABLES = ("mpt_fsdp", "torchtitan_fsdp", "pytorch_fsdp")
VOCABULARY = 50368
NODE = 8


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Tokens and labels [batch, sequence] to the mean cross entropy, in float32 as autocast computes it; the head is
    tied to the embedding.
    """

    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.layers = nn.ModuleList(Block(width, Attention(width, heads)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. flops: of a device in a step, what runs again among it."""

    table: str
    device: str
    model: str
    sequence: int
    gpus: int
    samples: int
    microbatches: int
    recompute: bool
    measured_s: float
    predicted_s: float
    flops: float


@functools.cache
def analysis_of(model: str, sequence: int) -> Analysis:
    if model in LLAMAS or model in GPTS:
        spec = f"hf:gpt2?{GPTS.get(model)}&n_positions={sequence}&seq={sequence}&padding=no"
        if model in LLAMAS:
            spec = f"hf:llama?{LLAMAS[model]}&max_position_embeddings={sequence}&seq={sequence}&padding=no"
        loaded = load_model(spec, meta=True, dtype=torch.bfloat16)
        return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))
    with torch.device("meta"):
        module = Model(*SIZES[model], sequence).bfloat16()
        tokens = torch.zeros(2, sequence, dtype=torch.long)
    return analyze(capture(module, (tokens, tokens), {}, check_eval=False))


def priced(table: str, row: dict[str, str]) -> Priced:
    sequence, gpus, samples = int(row["sequence"]), int(row["gpus"]), int(row["samples"])
    microbatches, batch, again = int(row["microbatches"]), int(row["batch"]), row["recompute"] == "yes"
    nodes = f"{gpus // NODE}x{NODE}x{row['device']}"
    analysis = analysis_of(row["model"], sequence)
    plan = make_plan(
        analysis.program,
        Change(memory=4.0).applied(Cluster.parse(nodes)),
        analysis=analysis,
        batch=batch,
        pp=1,
        dp=gpus,
        tp=1,
        microbatches=microbatches,
        recompute="full" if again else "none",
        meshes="equal",
        zero=3,
    )
    return Priced(
        *(table, row["device"], row["model"], sequence, gpus, samples, microbatches, again),
        *(batch * sequence / float(row["tokens_per_s"]), plan.step_time_s, plan.flops * (4 / 3 if again else 1) / gpus),
    )


def report(rows: list[Priced]) -> None:
    print(
        tabulate(
            [
                (
                    *(row.device, row.model, row.sequence, row.gpus, f"{row.microbatches} x {row.samples}"),
                    *("full" if row.recompute else "", f"{row.measured_s:.3f}", f"{row.predicted_s:.3f}"),
                    f"{published_rows.error(row):+.1%}",
                )
                for row in rows
            ],
            headers=("device", "model", "sequence", "GPUs", "batch", "again", "measured s", "predicted s", "error"),
            disable_numparse=True,
        )
    )
    table = []
    for name, device in dict.fromkeys((row.table, row.device) for row in rows):
        own = [row for row in rows if (row.table, row.device) == (name, device)]
        rate = median(row.flops / row.measured_s for row in own)
        off, middle, correlation = published_rows.summary(own)
        constant = f"{mean(abs(row.flops / rate / row.measured_s - 1) for row in own):.1%}"
        table.append((name, device, len(own), off, middle, constant, correlation))
    headers = ("table", "device", "rows", "mean |error|", "median error", "one constant", "rank correlation")
    print("\n" + tabulate(table, headers=headers, disable_numparse=True))


def main() -> None:
    parser = published_rows.parser(__doc__, "device, model and sequence")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of these the first of every N rows")
    options = parser.parse_args()
    chosen = [
        (table, row)
        for table in TABLES
        for row in read_table(table)
        if options.only in f"{row['device']} {row['model']} {row['sequence']} {row['gpus']}"
    ]
    rows = [priced(*item) for item in chosen[:: options.every]]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()

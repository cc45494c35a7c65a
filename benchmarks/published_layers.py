"""The planner's prices against measured layers of transformers on one GPU: RTX 3090 Ti, 4090, A6000, A100, V100.

    python benchmarks/published_layers.py [--only TEXT] [--json]

The rows of ``autopart/cost/published/transformer_layers.csv``: single layers of BERT, GPT-2 and T5 with attention in
single ops, in float16, from batches of 2 to 128, forward and with their backward. Captured without weights and priced
by ``make_plan`` for one device. Of these measurements the presets of RTX GPUs have the rate of one large product and of
one copy (``devices.toml``); no layer was looked at.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import mean

import torch
from tabulate import tabulate
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, T5Config
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.t5.modeling_t5 import T5Block

import published_rows
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost.published import read_table
from autopart.planner import make_plan
from autopart.tracing import capture
from autopart.what_if import Change

WIDTH, HEADS = 1024, 16
LARGE = 8
"""Samples of a batch from which on the device, and neither its host nor its cache, sets the pace."""


class Layer(nn.Module):
    """A layer on hidden states [batch, sequence, width], to the sum of its results, as it was measured."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.crosses = name == "t5_decoder"
        self.layer: nn.Module
        if name == "bert":
            self.layer = BertLayer(
                BertConfig(
                    hidden_size=WIDTH,
                    num_attention_heads=HEADS,
                    intermediate_size=4 * WIDTH,
                    attn_implementation="eager",
                )
            )
        elif name == "gpt2":
            config = GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_implementation="eager")
            self.layer = GPT2Block(config, layer_idx=0)
        else:
            sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "num_heads": HEADS, "d_kv": WIDTH // HEADS}
            config = T5Config(**sizes, is_decoder=self.crosses, is_encoder_decoder=False, use_cache=False)
            config._attn_implementation = "eager"
            self.layer = T5Block(config, layer_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x, encoder_hidden_states=x) if self.crosses else self.layer(x)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result.sum()


@dataclass(frozen=True, slots=True)
class Priced:
    """A row. measured_s, predicted_s: forward and back."""

    device: str
    layer: str
    sequence: int
    batch: int
    forward_s: float
    measured_s: float
    predicted_forward_s: float
    predicted_s: float


@functools.cache
def analysis_of(layer: str, sequence: int) -> Analysis:
    with torch.device("meta"):
        module = Layer(layer).half().train()
        x = torch.empty(2, sequence, WIDTH, dtype=torch.float16)
    return analyze(capture(module, (x,), check_eval=False))


def flops(layer: str, sequence: int, batch: int) -> float:
    """Of the forward, as the tables count them."""
    attention = 4 * WIDTH * sequence**2 + 8 * sequence * WIDTH**2
    return batch * (16.0 * sequence * WIDTH**2 + (2 if layer == "t5_decoder" else 1) * attention)


def priced(row: dict[str, str]) -> Priced:
    layer, sequence, batch = row["layer"], int(row["sequence"]), int(row["batch"])
    analysis = analysis_of(layer, sequence)
    plan = make_plan(
        analysis.program,
        Change(memory=4.0).applied(Cluster.parse(f"1x{row['device']}")),
        analysis=analysis,
        batch=batch,
        pp=1,
        dp=1,
        tp=1,
        microbatches=1,
        recompute="none",
    )
    (stage,) = plan.stages
    work = flops(layer, sequence, batch) / 1e12
    measured = work / float(row["forward_tflops"]), 3 * work / float(row["both_tflops"])
    predicted = stage.forward_s, stage.forward_s + stage.backward_s
    return Priced(row["device"], layer, sequence, batch, *measured, *predicted)


def report(rows: list[Priced]) -> None:
    print(
        tabulate(
            [
                (
                    *(row.device, row.layer, row.sequence, row.batch),
                    *(f"{1e3 * row.forward_s:.2f}", f"{1e3 * row.predicted_forward_s:.2f}"),
                    f"{row.predicted_forward_s / row.forward_s - 1:+.0%}",
                    *(f"{1e3 * row.measured_s:.2f}", f"{1e3 * row.predicted_s:.2f}"),
                    f"{published_rows.error(row):+.0%}",
                )
                for row in rows
            ],
            headers=(
                *("device", "layer", "sequence", "batch", "forward ms", "predicted", "error"),
                *("with backward ms", "predicted", "error"),
            ),
            disable_numparse=True,
        )
    )
    table = []
    for device in dict.fromkeys(row.device for row in rows):
        for name, some in (("all", rows), (f"{LARGE} and more", [row for row in rows if row.batch >= LARGE])):
            own = [row for row in some if row.device == device]
            forward = mean(abs(row.predicted_forward_s / row.forward_s - 1) for row in own)
            table.append((device, name, len(own), f"{forward:.1%}", *published_rows.summary(own)))
    headers = ("device", "batches", "rows", "forward", "with backward", "median", "rank correlation")
    print("\nmean |error|\n" + tabulate(table, headers=headers, disable_numparse=True))


def main() -> None:
    options = published_rows.parser(__doc__, "device and layer").parse_args()
    chosen = [row for row in read_table("transformer_layers") if options.only in f"{row['device']} {row['layer']}"]
    rows = [priced(row) for row in chosen]
    published_rows.show(rows, options.json, report)


if __name__ == "__main__":
    main()

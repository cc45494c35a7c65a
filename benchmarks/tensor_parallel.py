"""Emitted programs against torch's own parallel wrappers, paired in one run on two gloo processes.

    python benchmarks/tensor_parallel.py [--rounds 15] [--only tensor|data|zero3] [--layers 4] [--width 384]

    tensor  Megatron's split against the same split by torch.distributed.tensor.parallel.parallelize_module
    data    replicas against DistributedDataParallel
    zero3   parameters divided over replicas against FSDP2's fully_shard of every layer and the root

A small Llama in float32 from the same weights on the same batches with AdamW, one thread per process. Both programs
live in the same processes; rounds alternate, so that drift of the machine falls on both, and a barrier stands before
each step. Reported are medians of the step's seconds on the slower rank and of the per-round ratios, and the losses.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from autopart.analysis import analyze
from autopart.api import load
from autopart.cluster import Cluster
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.tracing import capture

RANKS = 2
VOCABULARY, SEQUENCE, BATCH = 2048, 128, 8
KINDS = ("tensor", "data", "zero3")
# Megatron's split of a Llama's layer; what is not named is replicated.
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def build(layers: int, width: int) -> nn.Module:
    """The same weights at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def inputs() -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def own_part(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    size = BATCH // RANKS
    return {name: tensor[rank * size : (rank + 1) * size] for name, tensor in batch.items()}


# --- Emitted programs ---


def emit(kind: str, layers: int, width: int, folder: Path) -> None:
    program = capture(build(layers, width), (), inputs())
    analysis = analyze(program)
    dp, tp = (1, RANKS) if kind == "tensor" else (RANKS, 1)
    plan = make_plan(
        program,
        Cluster.local(RANKS),
        batch=BATCH,
        analysis=analysis,
        pp=1,
        microbatches=1,
        recompute="none",
        dp=dp,
        tp=tp,
    )
    if kind == "zero3":
        plan = replace(plan, zero={info.name: 3 for info in program.parameters})
    if kind == "tensor":
        plan = megatron(plan)
    realize(program, plan, analysis).save(folder)


def megatron(plan: Plan) -> Plan:
    """The plan with Megatron's split: heads and the MLP's inner dim on the tensor axis, the rest on every rank."""
    layer = "model.layers.*."
    heads = {name: text for name, text in plan.strategies.items() if name.startswith(f"{layer}self_attn")}
    strategies = {
        **heads,
        **{f"{layer}{name}:linear": "n" for name in COLUMNS},
        **{f"{layer}{name}:linear": "k" for name in ROWS},
        f"{layer}mlp.act_fn:silu": "d2",
        f"{layer}mlp:mul": "d2",
    }
    storage = {f"{layer}{name}.weight": "S0" for name in COLUMNS} | {f"{layer}{name}.weight": "S1" for name in ROWS}
    return replace(plan, strategies=strategies, storage=storage)


def step_of(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], tuple[float, float]]:
    """A function that trains one step and returns its seconds and its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> tuple[float, float]:
        dist.barrier()
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start, loss.item()

    return step


# --- torch's wrappers ---


def wrapped(kind: str, model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS,))
    if kind == "data":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "zero3":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.model.layers:
        styles: dict[str, Any] = {name: ColwiseParallel() for name in COLUMNS}
        styles.update({name: RowwiseParallel() for name in ROWS})
        parallelize_module(layer, mesh, styles)
    return model


# --- Both, in turn ---


def compare(rank: int, kind: str, folder: str, rounds: int, layers: int, width: int) -> None:
    """What each process does; rank 0 writes the result beside the program."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    batch = inputs() if kind == "tensor" else own_part(inputs(), rank)
    original = build(layers, width)
    theirs = step_of(wrapped(kind, copy.deepcopy(original)), batch)
    ours = step_of(load(f"{folder}/program", original, batch="global" if kind == "tensor" else "local"), batch)
    losses = [(theirs()[1], ours()[1]) for _ in range(3)]
    seconds = []
    for index in range(rounds):
        pair = torch.tensor([0.0, 0.0])
        for position, step in ((0, theirs), (1, ours)) if index % 2 else ((1, ours), (0, theirs)):
            pair[position] = step()[0]
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        seconds.append(pair.tolist())
    means = torch.tensor(losses)
    if kind != "tensor":
        total = means[:, 0].clone()  # each replica sees its own part's loss
        dist.all_reduce(total)
        means[:, 0] = total / RANKS
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps({"seconds": seconds, "losses": means.tolist()}))
    dist.barrier()
    dist.destroy_process_group()


def measure(kind: str, rounds: int, layers: int, width: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        emit(kind, layers, width, Path(folder) / "program")
        spawn(compare, (kind, folder, rounds, layers, width), RANKS)
        found = json.loads(Path(folder, "result.json").read_text())
    theirs, ours = (statistics.median(column) for column in zip(*found["seconds"], strict=True))
    ratios = sorted(two / one for one, two in found["seconds"])
    return {
        "torch_s": theirs,
        "emitted_s": ours,
        "ratio": statistics.median(ratios),
        "lowest_ratio": ratios[0],
        "highest_ratio": ratios[-1],
        "losses": found["losses"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kinds = KINDS if arguments.only is None else (arguments.only,)
    results = {kind: measure(kind, arguments.rounds, arguments.layers, arguments.width) for kind in kinds}
    if arguments.json:
        print(json.dumps(results))
        return
    for kind, found in results.items():
        print(
            f"{kind:6} torch {found['torch_s'] * 1e3:7.1f} ms, emitted {found['emitted_s'] * 1e3:7.1f} ms, "
            f"ratio {found['ratio']:.3f} ({found['lowest_ratio']:.3f} to {found['highest_ratio']:.3f}); "
            f"losses after 3 steps {found['losses'][-1][0]:.6f}, {found['losses'][-1][1]:.6f}"
        )


if __name__ == "__main__":
    main()

"""Captured programs by hand: run as graphs, split, emitted and run, for the tests of the passes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.passes.batch import BatchSplit, split_batch
from autopart.passes.blocks import chain, find_blocks, free_nodes
from autopart.passes.conversion import Axes
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.emit.program import Emitted, Layout, emit_program
from autopart.passes.partition import Crossing, StageGraph, partition
from autopart.passes.program import Program, Role
from autopart.passes.rules import RULES, Strategy, compatible, strategies
from autopart.passes.shard import shard_stage
from autopart.runtime.placement import Placements
from autopart.runtime.structure import flatten
from autopart.tracing import capture

Values = dict[str, Any]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def run_graph(
    program: Program,
    graph: fx.Graph,
    model: nn.Module,
    inputs: Mapping[str, Any],
    samples: int,
    batch: int | None = None,
    totals: Mapping[str, Tensor] | None = None,
) -> tuple[Any, ...]:
    """What a graph of the program returns for nested ``inputs`` (flattened here)."""
    held = tensors_of(model)
    leaves = flatten(dict(inputs))[0]

    def value(node: fx.Node) -> Any:
        role, name = node.meta["role"], node.meta["name"]
        if role is Role.BATCH:
            return samples
        if role is Role.GLOBAL_BATCH:
            return batch
        if role in (Role.PARAMETER, Role.BUFFER):
            return held[name] if name in held else program.constants[name]
        return totals[name] if role is Role.TOTAL and totals is not None else leaves[name]

    arguments = [value(node) for node in graph.nodes if node.op == "placeholder"]
    return tuple(fx.Interpreter(nn.Module(), graph=graph, garbage_collect_values=False).run(*arguments))


def outputs_by_name(program: Program, results: Sequence[Any]) -> dict[str, Any]:
    return dict(zip([info.name for info in program.outputs if info.node is not None], results, strict=False))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, taken out of the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


def in_shares(
    program: Program, split: BatchSplit, model: nn.Module, inputs: Mapping[str, Any], batch: int, shares: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Outputs and gradients of a batch that is computed in equal shares and put together as ``split.combine`` says."""
    totals: dict[str, Tensor] = {}
    if split.totals is not None:
        found = run_graph(program, split.totals, model, inputs, batch, batch)
        totals = dict(zip(split.total_names, found, strict=True))
    dims = {spec.name: spec.batch_dim for spec in program.inputs}
    leaves, structure = flatten(dict(inputs))
    parts: list[dict[str, Any]] = []
    from autopart.runtime.structure import rebuild

    for index in range(shares):
        size = batch // shares
        mine = {
            path: leaf.narrow(dim, index * size, size)
            if isinstance(leaf, Tensor) and (dim := dims[path]) is not None
            else leaf
            for path, leaf in leaves.items()
        }
        results = run_graph(program, split.graph, model, rebuild(structure, mine), size, batch, totals)
        parts.append(outputs_by_name(program, results))
        if program.loss is not None:
            parts[-1][program.loss].backward()
    whole: dict[str, Any] = {}
    for name, (kind, dim, blocks) in split.combine.items():
        pieces = [part[name] for part in parts]
        if kind == "cat":
            inside = [piece.unflatten(dim, (blocks, -1)) for piece in pieces]
            whole[name] = torch.cat(inside, dim + 1).flatten(dim, dim + 1)
        else:
            whole[name] = sum(pieces) if kind == "sum" else pieces[0]
    return whole, gradients(model)


@dataclass(slots=True)
class Compiled:
    """All steps of one compilation."""

    program: Program
    split: BatchSplit
    stages: list[StageGraph]
    graphs: list[fx.Graph]
    crossings: list[Crossing]
    emitted: Emitted
    axes: Axes


Choose = Callable[..., tuple[dict[fx.Node, tuple[Strategy, ...]], dict[str, Placements]]]
"""Strategies and storage for a graph; called with the graph and the size of each tensor axis."""


def compile_program(
    program: Program,
    pp: int = 1,
    dp: int = 1,
    microbatches: int = 1,
    axes: Axes = (),
    choose: Choose | None = None,
    recompute: bool = False,
    boundaries: Sequence[int] | None = None,
) -> Compiled:
    """The plan by hand: equal numbers of blocks per stage, strategies from ``choose``."""
    split = split_batch(program, RULES)
    free = free_nodes(split.graph, program.updated_buffers)
    blocks = find_blocks(chain(split.graph, free), lambda node: 1.0, 8)
    count = len(blocks)
    bounds = list(boundaries) if boundaries else [round(index * count / pp) for index in range(pp + 1)]
    stages, crossings = partition(program, split.graph, blocks, bounds)
    chosen, storage = ({}, {}) if choose is None else choose(split.graph, *(parts for _, parts in axes))
    chosen = {node: found for node, found in chosen.items() if node not in free}
    graphs = [shard_stage(stage, axes, chosen, storage) for stage in stages]
    ranks = dp * math.prod(parts for _, parts in axes)
    layout = Layout(
        devices=tuple(tuple(range(index * ranks, (index + 1) * ranks)) for index in range(pp)),
        dp=dp,
        axes=axes,
        schedule="1f1b",
        microbatches=microbatches,
        recompute=tuple(frozenset(recomputable_layers(graph) if recompute else ()) for graph in graphs),
        headings=tuple((f"Stage {index} of {pp} of {program.name}.",) for index in range(pp)),
    )
    emitted = emit_program(program, split, stages, graphs, crossings, storage, layout)
    return Compiled(program, split, stages, graphs, crossings, emitted, axes)


def compile_model(
    directory: Path, model: nn.Module, kwargs: Mapping[str, Any], check_eval: bool = False, **options: Any
) -> Compiled:
    """Captures, compiles and writes a model. check_eval: as of ``capture``, for programs that are to be evaluated."""
    compiled = compile_program(capture(model, (), kwargs, check_eval=check_eval), **options)
    compiled.emitted.save(directory)
    return compiled


def randomly(seed: int) -> Choose:
    """Any strategies for every op and any storage for every parameter that hold together on the axes: all pairs of
    placements meet.
    """

    def choose(graph: fx.Graph, *sizes: int) -> tuple[dict[fx.Node, tuple[Strategy, ...]], dict[str, Placements]]:
        dice = random.Random(seed)
        found: dict[fx.Node, tuple[Strategy, ...]] = {}
        storage: dict[str, Placements] = {}
        offers = [
            strategies(graph, parts, others=[*sizes[:index], *sizes[index + 1 :]]) for index, parts in enumerate(sizes)
        ]
        for node in offers[0]:
            picked = tuple(dice.choice(offered[node]) for offered in offers)
            while not compatible(node, picked, sizes):
                picked = tuple(dice.choice(offered[node]) for offered in offers)
            if node.op != "placeholder":
                found[node] = picked
            elif node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                storage[node.meta["name"]] = tuple(item.outputs[0] for item in picked)
        return found, storage

    return choose

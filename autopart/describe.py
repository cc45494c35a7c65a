"""The plan of a solved candidate, timed on the graphs that will be emitted.

Times, collectives and parameter counts come from every stage's own graph; memory and the work at the end of a step
from the blocks' estimates (:mod:`autopart.candidates`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopart.answers import Answer
from autopart.candidates import Candidates
from autopart.cost.communication import send_seconds
from autopart.device_layout import TENSOR_AXIS
from autopart.exchanges import exchanges
from autopart.passes.amounts import value_bytes
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut, cut_parameters
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.emit.segments import recomputable
from autopart.passes.program import Role
from autopart.passes.shard import value_placements
from autopart.plan import Plan, StagePlan, Transfers
from autopart.predict import simulate_plan
from autopart.prices import Chosen, share_of
from autopart.realize import Realization, build, level_names, storage_names, strategy_names
from autopart.shared_hosts import SharedHosts
from autopart.solver.degrees import Config, Degrees
from autopart.solver.stages_problem import StageProblem, Way
from autopart.stage_clock import StageClock, StageSeconds
from autopart.step_time import step_end_seconds
from autopart.tensor_choice import TensorChoice


def describe(candidates: Candidates, answer: Answer) -> Plan:
    """The plan, without the search's account of bounds and alternatives."""
    analysis, config, choice = candidates.analysis, answer.config, answer.choice
    axes, problem = candidates.layout.axes(config), answer.problem
    boundaries, order = problem.boundaries(answer.way), problem.order(answer.way)
    cuts = cut_parameters(analysis.program.tensors, choice.storage, axes, config.dp, choice.levels)
    found = _built(candidates, boundaries, axes, choice, cuts, order)
    places = candidates.layout.places(config)
    again, recompute = recomputed(candidates, config, answer.way, problem, found)
    exchanged = exchanges(
        *(analysis, found, config.dp, candidates.samples(config), again, candidates.bucket_bytes(config)), places
    )
    timed: list[StageSeconds] = []
    for stage, graph, layers, sent in zip(found.stages, found.local, again, exchanged, strict=True):
        ahead = sum(before.forward_s + before.arrival_s for before in timed)
        timed.append(StageClock(candidates, config, stage, graph, choice, layers, sent).seconds(ahead))
    weights = [candidates.weight_share(config, choice, problem, step) for step in answer.way]
    estimated = candidates.arriving_seconds(config, choice)
    stages = []
    for index, (times, weight) in enumerate(zip(timed, weights, strict=True)):
        first, last, graph, step = boundaries[index], boundaries[index + 1], found.local[index], answer.way[index]
        known = sum(estimated[block] for block in problem.blocks_between(step.first, step.last))
        stages.append(
            StagePlan(
                devices=candidates.layout.ranks(config, index),
                mesh=(("dp", config.dp), *(axes or ((TENSOR_AXIS, 1),))),
                blocks=(first, last),
                first_op=analysis.keys[analysis.blocks[order[first]].nodes[0]],
                last_op=analysis.keys[analysis.blocks[order[last - 1]].nodes[-1]],
                forward_s=times.forward_s,
                backward_s=times.backward_s,
                hidden_s=times.hidden_s,
                weight_s=times.backward_s * weight,
                memory_bytes=round(problem.stage_bytes(index, step)),
                state_bytes=round(problem.state_bytes(step)),
                capacity_bytes=candidates.layout.capacity(config, index),
                parameters=held_numbers(graph, axes, found.cuts, config.dp),
                collectives=exchanged[index].microbatch,
                axis_collectives=exchanged[index].axes,
                step_end_s=max(0.0, step_end_seconds(problem, step, config.schedule, weight) - known),
                arrival_s=times.arrival_s,
                step_collectives=exchanged[index].step,
                recompute=again[index] if recompute == "some" else (),
                device=candidates.cluster.names(candidates.layout.ranks(config, index)),
            )
        )
    return timed_plan(
        candidates,
        config,
        stages,
        transfers=_transfers(candidates, config, found, choice.strategies),
        tied_s=problem.tied_seconds(answer.way),
        strategies=strategy_names(analysis, choice.strategies),
        storage=storage_names(analysis, choice.storage),
        recompute=recompute,
        zero=level_names(analysis, choice.levels),
        warmup=candidates.warmup_of(config),
        bucket_bytes=candidates.bucket_bytes(config),
        order=order if order != tuple(range(len(order))) else (),
    )


def _built(
    candidates: Candidates,
    boundaries: tuple[int, ...],
    axes: Axes,
    choice: TensorChoice,
    cuts: dict[str, DataCut],
    order: tuple[int, ...],
) -> Realization:
    """The stages' graphs, which answers that differ in microbatches, replicas or levels of ZeRO alone share."""
    asked = boundaries, axes, order, choice.strategies, choice.storage
    for known, found in candidates.built:
        if known == asked:
            return replace(found, cuts=cuts)
    found = build(candidates.analysis, boundaries, axes, choice.strategies, choice.storage, cuts, order)
    candidates.built.append((asked, found))
    return found


def timed_plan(
    candidates: Candidates,
    config: Config,
    stages: Sequence[StagePlan],
    *,
    transfers: Transfers,
    tied_s: float,
    strategies: Mapping[str, str],
    storage: Mapping[str, str],
    zero: Mapping[str, int],
    recompute: str,
    warmup: tuple[int, ...],
    bucket_bytes: int,
    order: tuple[int, ...] = (),
) -> Plan:
    """The plan of these stages with the step's simulated seconds."""
    analysis, program = candidates.analysis, candidates.analysis.program
    shared = SharedHosts.of(candidates.cluster)
    plan = Plan(
        fingerprint=program.fingerprint,
        model=program.name,
        cluster=str(candidates.cluster),
        cluster_digest=candidates.cluster.digest,
        batch=candidates.batch,
        dtype=program.computes_in,
        schedule=config.schedule,
        microbatches=config.microbatches,
        stages=tuple(stages),
        recompute=recompute,
        strategies=strategies,
        storage=storage,
        zero=zero,
        tokens=program.tokens(candidates.batch),
        flops=analysis.flops(candidates.batch),
        peak_flops=_peak(candidates, {device for stage in stages for device in stage.devices}),
        notes=(*program.notes, *analysis.split.notes, *([analysis.split.flaw] if analysis.split.flaw else [])),
        warmup=warmup,
        transfers=transfers,
        tied_s=tied_s,
        order=order,
        shared_host=shared.size if shared else 0,
        alone=shared.alone if shared else 1.0,
        optimizer=candidates.optimizer,
        bucket_bytes=bucket_bytes,
        example_batch=analysis.samples,
    )
    return replace(plan, step_time_s=simulate_plan(plan).makespan_s + plan.tied_s)


def recomputed(
    candidates: Candidates, config: Config, way: Way, problem: StageProblem, found: Realization
) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The layers, and modules in layers, that each stage runs again in the backward, and how a plan calls that."""
    if config.recompute == "full":
        return tuple(recomputable_layers(graph) for graph in found.local), "full"
    again = []
    for graph, step in zip(found.local, way, strict=True):
        chosen = candidates.computed_again(config, step, problem)
        again.append(tuple(path for path in recomputable(graph) if path in chosen) if chosen else ())
        left = chosen.difference(again[-1])
        assert not left, f"the stage's memory is that of {sorted(left)} computed again, which its code cannot"
    if not any(again):
        return tuple(again), "none"
    return tuple(again), "full" if again == [recomputable_layers(graph) for graph in found.local] else "some"


def _transfers(
    candidates: Candidates,
    config: Degrees,
    found: Realization,
    strategies: Mapping[fx.Node, Chosen],
) -> Transfers:
    """Seconds between stages: every value is sent straight from the stage that makes it to those that use it."""
    sent: dict[tuple[int, int], list[float]] = {}
    samples = candidates.samples(config)
    for crossing in found.crossings:
        placements = value_placements(crossing.value, strategies, found.axes)
        size = value_bytes(crossing.value).at(samples) * share_of(placements, config.axes)
        back = size if crossing.value.node.meta.get("differentiable") else 0.0
        for target in crossing.targets:
            entry = sent.setdefault((crossing.source, target), [0.0, 0.0])
            entry[0] += size
            entry[1] += back
    transfers = []
    for (source, target), (there, back) in sorted(sent.items()):
        if candidates.layout.ranks(config, source) == candidates.layout.ranks(config, target):
            transfers.append((source, target, 0.0, 0.0 if back else None))
            continue
        link = candidates.layout.stage_link(config, source, target)
        transfers.append((source, target, send_seconds(there, link), send_seconds(back, link) if back else None))
    return tuple(transfers)


def held_numbers(graph: fx.Graph, axes: Axes, cuts: Mapping[str, DataCut], replicas: int) -> int:
    """Numbers in the parameters that one rank of a stage holds between its steps."""
    total = 0
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER:
            cut = cuts.get(node.meta["name"])
            whole = replicas if cut is not None and cut.level == 3 else 1
            share = share_of(node.meta["placements"], [parts for _, parts in axes])
            total += round(node.meta["val"].numel() * share) // whole
    return total


def _peak(candidates: Candidates, devices: Iterable[int]) -> float:
    """FLOP/s of the devices in the type that products compute in."""
    dtype = candidates.analysis.products_in
    return sum(candidates.cluster.device(rank).peak(dtype) for rank in devices)

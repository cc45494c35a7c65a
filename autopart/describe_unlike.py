"""The plan of a solved candidate with unlike meshes, timed on the graphs that will be emitted."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopart.describe import held_numbers, recomputed, timed_plan
from autopart.device_layout import TENSOR_AXIS
from autopart.exchanges import exchanges_unlike
from autopart.passes.data_axis import DataCut, cut_parameters
from autopart.passes.unlike_meshes import plain
from autopart.piece_prices import End, Traffic, add_traffic, crossing_seconds
from autopart.plan import Plan, StagePlan, Transfers
from autopart.realize import Realization, build_unlike, level_names, storage_names, strategy_names
from autopart.stage_clock import StageClock
from autopart.step_time import step_end_seconds
from autopart.unlike import UnlikeCandidates
from autopart.unlike_answer import UnlikeAnswer


def describe_unlike(unlike: UnlikeCandidates, answer: UnlikeAnswer) -> Plan:
    """The plan, without the search's account of bounds and alternatives."""
    candidates, config, problem = unlike.candidates, answer.config, answer.problem
    analysis, priced = candidates.analysis, answer.stages
    boundaries, order = problem.boundaries(answer.way), problem.order(answer.way)
    settings = [item.setting for item in priced]
    held = [answer.held(stage) for stage in range(config.stages)]
    found = replace(build_unlike(analysis, boundaries, settings, order), cuts=_cuts(answer, held))
    rows = [max(item.mesh.rows) for item in priced]
    again, recompute = recomputed(candidates, config, answer.way, problem, found)
    exchanged = exchanges_unlike(*(analysis, found, settings, rows, again, answer.places), unlike.prices.bucket_bytes)
    named = [
        (strategy_names(analysis, own.strategies), storage_names(analysis, own.storage)) if own.axes else ({}, {})
        for own in settings
    ]
    # one table for all where those with tensor axes agree
    common = {repr(own): own for own, setting in zip(named, settings, strict=True) if setting.axes}
    shared = next(iter(common.values()), ({}, {})) if len(common) < 2 else ({}, {})
    stages: list[StagePlan] = []
    for index, (item, step) in enumerate(zip(priced, answer.way, strict=True)):
        first, last = boundaries[index], boundaries[index + 1]
        graph, own = found.local[index], settings[index]
        times = [
            StageClock(
                *(part.candidates, part.config, found.stages[index], graph, item.choice),
                *(again[index], exchanged[index]),
            ).seconds(sum(stage.forward_s + stage.arrival_s for stage in stages))
            for part in item.parts
        ]
        held_bytes, state_bytes, capacity_bytes = most_held(answer, index)
        inside = problem.blocks_between(step.first, step.last)
        estimated = (part.candidates.arriving_seconds(part.config, item.choice) for part in item.parts)
        known = min(sum(own[block] for block in inside) for own in estimated)
        slowest = max(times, key=lambda found: found.backward_s)
        weight = item.parts[0].candidates.weight_share(item.parts[0].config, item.choice, problem, step)
        stages.append(
            StagePlan(
                devices=answer.devices[index],
                mesh=(("dp", own.dp), *(own.axes or ((TENSOR_AXIS, 1),))),
                blocks=(first, last),
                first_op=analysis.keys[analysis.blocks[order[first]].nodes[0]],
                last_op=analysis.keys[analysis.blocks[order[last - 1]].nodes[-1]],
                forward_s=max(found.forward_s for found in times),
                backward_s=slowest.backward_s,
                hidden_s=slowest.hidden_s,
                weight_s=slowest.backward_s * weight,
                memory_bytes=round(held_bytes),
                state_bytes=round(state_bytes),
                capacity_bytes=int(capacity_bytes),
                parameters=held_numbers(graph, own.axes, found.cuts, own.dp),
                collectives=exchanged[index].microbatch,
                axis_collectives=exchanged[index].axes,
                step_end_s=max(0.0, step_end_seconds(problem, step, config.schedule, weight) - known),
                arrival_s=max(found.arrival_s for found in times),
                step_collectives=exchanged[index].step,
                recompute=again[index] if recompute == "some" else (),
                device=candidates.cluster.names(answer.devices[index]),
                shares=own.shares,
                strategies=named[index][0] if len(common) > 1 else {},
                storage=named[index][1] if len(common) > 1 else {},
            )
        )
    return timed_plan(
        candidates,
        config,
        stages,
        transfers=_transfers(unlike, answer, found),
        tied_s=unlike.tied_seconds(answer),
        strategies=shared[0],
        storage=shared[1],
        recompute=recompute,
        zero=level_names(analysis, {name: level for own in held for name, level in own.items()}),
        warmup=candidates.warmup_of(config.equal),
        bucket_bytes=unlike.prices.bucket_bytes,
        order=order if order != tuple(range(len(order))) else (),
    )


def most_held(answer: UnlikeAnswer, index: int) -> tuple[float, float, float]:
    """Bytes that a rank of a stage holds, its state, and its capacity: of the replica that holds the most.

    Where a rank has several stages, each has an even part of the capacity.
    """
    problem, item, step = answer.problem, answer.stages[index], answer.way[index]
    slot, found = problem.slots[step.slot], []
    least = min(part.candidates.device.memory_bytes for part in item.parts)
    for part, shape in zip(item.parts, item.alone, strict=True):
        own = problem.with_shape(slot.shape, shape)
        capacity = slot.capacity_bytes * part.candidates.device.memory_bytes / least
        found.append((own.stage_bytes(index, step), own.state_bytes(step), capacity))
    return max(found)


def _cuts(answer: UnlikeAnswer, held: Sequence[Mapping[str, int]]) -> dict[str, DataCut]:
    """What the replicas of a stage divide between them. held: levels of ZeRO of each stage's parameters."""
    found: dict[str, DataCut] = {}
    for item, own in zip(answer.stages, held, strict=True):
        tensors = item.parts[0].candidates.analysis.program.tensors
        found |= cut_parameters(tensors, item.choice.storage, item.axes, item.mesh.dp, own)
    return found


def _transfers(unlike: UnlikeCandidates, answer: UnlikeAnswer, found: Realization) -> Transfers:
    """Seconds between stages: every value is sent straight from the stage that makes it to those that use it."""
    priced = answer.stages
    sent: dict[tuple[int, int], tuple[Traffic, Traffic]] = {}
    ends = [End(devices, item.mesh.rows, item.mesh.axes) for item, devices in zip(priced, answer.devices, strict=True)]
    for crossing in found.crossings:
        source, value = priced[crossing.source], crossing.value
        made = source.placements(value)
        if not all(source.mesh.is_alike(priced[target].mesh) for target in crossing.targets):
            made = plain(made)
        for target in crossing.targets:
            there, back = sent.setdefault((crossing.source, target), ({}, {}))
            more = unlike.prices.pieces.traffic(
                value, ends[crossing.source], ends[target], made, priced[target].placements(value)
            )
            add_traffic(there, more[0])
            add_traffic(back, more[1])
    # between stages of one rank crossing_seconds finds nothing to send
    timed = []
    for (source_at, target_at), (there, back) in sorted(sent.items()):
        senders = max(priced[source_at].mesh.size, priced[target_at].mesh.size)
        link = functools.partial(unlike.candidates.cluster.link, senders=senders)
        seconds = crossing_seconds(there, link), crossing_seconds(back, link) if back else None
        timed.append((source_at, target_at, *seconds))
    return tuple(timed)

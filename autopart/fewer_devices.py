"""Whether some of a cluster's devices take less time alone: slow ones, or a slow network, can cost more than they add.

A plan uses all devices that it is made for. Here the fastest of them are planned for by themselves, where they may be
faster: of the seconds T_k that a device of kind k takes for a step, if nothing is exchanged, n_k devices of each kind
take 1 / sum_k (n_k / T_k) at least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopart.analysis import Analysis
from autopart.candidates import Candidates
from autopart.cluster import Cluster, Node
from autopart.cost.devices import Device
from autopart.earlier_plans import EarlierPlans
from autopart.forced_limits import what_would_fit
from autopart.frontier import first_devices
from autopart.plan import Plan
from autopart.planned import planned
from autopart.report.units import format_seconds
from autopart.runtime.errors import BatchError, InfeasibleError, PlanError
from autopart.solver.degrees import degrees
from autopart.solver.search_space import NotBetter

WORTH = 0.01
"""The share of a step that fewer devices have to save to be worth a note."""
MOST_TRIED = 3
"""Further plans that are made at most."""


def advised_plan(cluster: Cluster, analysis: Analysis, **limits: Any) -> Plan:
    """As :func:`autopart.planned.planned`, with a note where fewer of the cluster's devices would take less time,
    or as much where the others repeat what they do.

    Where limits name degrees, or devices share a host's cores, nothing is looked for. Further plans are made for parts
    that may be faster alone, the MOST_TRIED largest of them. Where nothing fits, the error says what it would without
    (:mod:`autopart.forced_limits`).
    """
    known = EarlierPlans()
    try:
        plan = planned(analysis.program, cluster, analysis=analysis, earlier=known, **limits)
    except InfeasibleError as error:
        closest = known.closest()
        if known.candidates is None or closest is None:
            raise
        advice = what_would_fit(known.candidates, closest, limits)
        raise InfeasibleError(f"{error}. {advice}" if advice else str(error), error.excess_bytes) from None
    if any(limits.get(name) is not None for name in ("pp", "dp", "tp")) or cluster.device(0).kind != "cuda":
        return plan
    candidates = known.candidates or Candidates(analysis, cluster, plan.batch, plan.optimizer)
    seconds = {node.device: least_seconds(candidates, node) for node in dict.fromkeys(cluster.nodes)}
    alike = _is_one_device_repeated(plan)
    most = (1 + WORTH if alike or _repeats(plan) else 1 - WORTH) * plan.step_time_s
    below, where = most, cluster
    tried = 0
    found_parts = list(parts(cluster, seconds))
    for part in [min(found_parts, key=lambda part: part.device_count)] if alike else found_parts:
        if 1 / math.fsum(1 / seconds[device] for device in part.devices) >= below or tried == MOST_TRIED:
            continue
        tried += 1
        try:
            found = planned(analysis.program, part, analysis=analysis, below=below, **limits)
        except (NotBetter, PlanError, BatchError):  # slower, nothing fits, or what is asked for cannot be had
            continue
        if found.step_time_s < below:
            below, where = found.step_time_s, part
    if where is cluster:
        return plan
    less = 1 - below / plan.step_time_s
    compared = f"{less:.0%} less than" if less >= WORTH else "as much as"
    note = (
        f"{where} alone takes {format_seconds(below)} a step, {compared} all "
        f"{cluster.device_count} devices; to leave the others out, plan for that cluster and start ranks on it alone"
    )
    return replace(plan, notes=(*plan.notes, note))


def _is_one_device_repeated(plan: Plan) -> bool:
    """Whether each device of several does the whole step."""
    return plan.device_count > 1 and plan.pp == plan.dp == 1 and not plan.strategies and not plan.storage


def _repeats(plan: Plan) -> bool:
    """Whether all nodes do what one does (see :mod:`autopart.wide_ranks`), and exchange nothing with each other."""
    stage = plan.stages[0]
    axes = stage.mesh[1:]
    whole = all(placements.split(",")[0] == "R" for placements in plan.storage.values())  # nothing is summed there
    return plan.pp == plan.dp == 1 and len(axes) > 1 and whole and not stage.axis_collectives.get(axes[0][0])


def least_seconds(candidates: Candidates, node: Node) -> float:
    """What one device of a node takes at least for the same step, in any microbatches; memory aside."""
    alone = candidates.elsewhere(first_devices(Cluster((node,)), 1))
    return min(alone.lower_bound(config) for config in degrees(1, alone.batch))


def parts(cluster: Cluster, seconds: Mapping[Device, float]) -> Iterator[Cluster]:
    """The fastest devices by themselves, the most first: without the slowest kinds, and halves of all, of these, …

    Of unlike nodes also each kind alone, and all but each: slow ports hold up devices that are fast. seconds: what a
    device of each kind takes.
    """
    fastest = Cluster(tuple(sorted(cluster.nodes, key=lambda node: seconds[node.device])))
    counts = {fastest.device_count >> halvings for halvings in range(1, fastest.device_count.bit_length())}
    kinds = itertools.pairwise(enumerate(fastest.devices))
    counts |= {at for (_, device), (at, other) in kinds if device != other}
    found = [first_devices(fastest, count) for count in counts]
    alike = dict.fromkeys(fastest.nodes)
    for kind in alike if len(alike) > 1 else ():
        found.append(Cluster(tuple(node for node in fastest.nodes if node == kind)))
        found.append(Cluster(tuple(node for node in fastest.nodes if node != kind)))
    yield from sorted(dict.fromkeys(found), key=lambda part: -part.device_count)

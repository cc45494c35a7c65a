"""What a plan tells its readers: what could not be done as forced, what was not tried, and what GPUs wait for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopart.analysis import pattern_of
from autopart.answers import Answer
from autopart.candidate_settings import same_but_for_memory
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.describe import describe
from autopart.device_row import DeviceRow
from autopart.passes.program import TensorInfo
from autopart.report.units import format_bytes, format_seconds
from autopart.several_axes import uncovered
from autopart.solver.degrees import Config, Degrees, axes_text
from autopart.solver.search_outcomes import Considered, Status
from autopart.unlike_answer import UnlikeAnswer

_WAITS = 1.1
"""Times as long as its GPU computes for which a host starts kernels, from which it is told."""
_TOLD = 0.005
"""Of a step's seconds: what would gain less is not told."""
_DIVIDED = {1: "the optimizer's state", 2: "gradients and the optimizer's state", 3: "parameters"}
"""By level of ZeRO."""


def notes(candidates: Candidates, answer: Answer | UnlikeAnswer, step_s: float) -> list[str]:
    """Of what was forced and could not be done, and of what a step of so many seconds waits for."""
    if isinstance(answer, Answer):
        return [
            *_unfit(candidates, answer.config),
            *_undivided(candidates, answer),
            *_whole(candidates, answer, step_s),
            *_least_rates(candidates.cluster),
            *_waiting(candidates, answer.config, answer),
        ]
    return [*_whole_in_stages(candidates, answer), *_waiting(candidates, answer.config.equal, answer)]


def whole_nodes(cluster: Cluster, considered: Iterable[Considered]) -> list[str]:
    """A note of unlike meshes that were searched on whole nodes alone."""
    row = DeviceRow(cluster)
    if not row.is_coarse or all(isinstance(item.config, Degrees) for item in considered):
        return []
    most = max(row.units)
    at_once = f", {most} of a kind at once" if most > 1 else ""
    return [
        f"of {cluster.device_count} devices, stages with meshes of their own were searched on whole nodes{at_once}: "
        "what others take counts neither in the choice nor in the lower bound"
    ]


def _whole_in_stages(candidates: Candidates, answer: UnlikeAnswer) -> list[str]:
    """A note of the parameters that the wanted level of ZeRO leaves whole, where stages have meshes of their own."""
    found = [answer.held(stage) for stage, item in enumerate(answer.stages) if item.mesh.dp > 1]
    whole = [name for own in found for name, level in own.items() if not level]
    tensors = candidates.analysis.program.tensors
    left = _sizes(tensors[name] for name in dict.fromkeys(whole) if not tensors[name].buffer)
    if not candidates.zero or not left:
        return []
    return [
        f"zero={candidates.zero} leaves these whole on all replicas of a stage, as several blocks read them or none of "
        f"their sizes on a rank divides by its replicas: {left}"
    ]


def _least_rates(cluster: Cluster) -> list[str]:
    """A note of devices that are priced as slower ones."""
    first = cluster.nodes[0].device
    if all(same_but_for_memory(node.device, first) for node in cluster.nodes):
        return []
    return [
        "all stages are priced with the least of each rate that any device has, and so is the lower bound; "
        "meshes=unlike prices each by its own devices, also where all have one mesh"
    ]


def _waiting(candidates: Candidates, config: Degrees, answer: Answer | UnlikeAnswer) -> list[str]:
    """A note of GPUs that would compute faster than their hosts start kernels."""
    starts = candidates.host_starts(config)
    if starts is None:
        return []
    waits: dict[int, tuple[float, float]] = {}
    for stage, step in enumerate(answer.way):
        host = sum(starts.of(answer.problem.blocks_between(step.first, step.last)))
        device = sum(choice.forward_s + choice.backward_s for choice in answer.problem.chosen(step))
        if host > _WAITS * device:
            waits[stage] = host, device
    if not waits:
        return []
    host, device = max(waits.values(), key=lambda both: both[0] - both[1])
    stages = "the stage" if len(answer.way) == 1 else f"{len(waits)} of {len(answer.way)} stages"
    return [
        f"GPUs of {stages} wait for their hosts: to start the kernels of a microbatch takes {format_seconds(host)} "
        f"(with the {format_seconds(candidates.device.host_s)} of one that the cluster says), to compute them "
        f"{format_seconds(device)}; larger microbatches take hardly longer, and fewer of them less"
    ]


def untried(considered: Sequence[Considered], bound: float) -> list[str]:
    """A note of the configurations that were left out to save time. bound: of the plan."""
    left = [item.seconds or 0.0 for item in considered if item.status is Status.UNTRIED]
    if not left:
        return []
    one, least, known = len(left) == 1, format_seconds(min(left)), format_seconds(bound)
    # the bound is the least of all, and what was tried may be bounded more loosely than what was not
    of_others = f" (the lower bound, {known}, is of one that was tried)" if known != least else ""
    return [
        f"{len(left)} of {len(considered)} configurations {'was' if one else 'were'} not tried, as "
        f"{'it is' if one else 'they are'} known to take at least {least}{of_others}; thorough (--thorough) tries "
        f"{'it' if one else 'them'}"
    ]


def unfactored(
    candidates: Candidates, configs: Sequence[Config], considered: Sequence[Considered], bound: float
) -> list[str]:
    """A note of the factorings into several tensor axes that the bound says nothing of."""
    tried = {item.config for item in considered if isinstance(item.config, Degrees)}
    left, least = uncovered(candidates, [item for item in configs if isinstance(item, Degrees)], tried, bound)
    if not left:
        return []
    return [
        f"the lower bound is of the tensor axes that were searched; {', '.join(map(axes_text, left))} were not, or not "
        f"with all other degrees, and take at least {format_seconds(least)} (as if ranks exchanged nothing); "
        f"--tp {axes_text(left[0])} plans on such axes"
    ]


def _unfit(candidates: Candidates, config: Degrees) -> list[str]:
    """Notes of the products that could not be run as the tensor scheme asks."""
    keys = candidates.analysis.keys
    found = dict.fromkeys(pattern_of(keys[node]) for node in candidates.setting(config).offers.unfit)
    axes = "x".join(map(str, config.axes))
    return [f"the tensor scheme {candidates.scheme.value} has no way to run {key} on {axes} ranks" for key in found]


def _undivided(candidates: Candidates, answer: Answer) -> list[str]:
    """A note of the parameters that the wanted level of ZeRO leaves whole."""
    level, replicas = candidates.zero, answer.config.dp
    if not level or replicas == 1:
        return []
    parameters = candidates.analysis.program.parameters
    left = _sizes(info for info in parameters if info.name not in answer.choice.levels)
    if not left:
        return []
    return [
        f"zero={level} leaves these whole on all {replicas} replicas, as none of their sizes on a rank divides by "
        f"{replicas}: {left}"
    ]


def _whole(candidates: Candidates, answer: Answer, step_s: float) -> list[str]:
    """A note of what a step would take where replicas divide parameters besides, which they do as memory asks."""
    least = candidates.seconds_of(answer) * (1 - _TOLD)
    levels = [found for found in candidates.divided(answer) if candidates.seconds_of(found) <= least]
    plans = [describe(candidates, found) for found in levels]
    seconds = min((plan.step_time_s for plan in plans), default=math.inf)
    if seconds > step_s * (1 - _TOLD):
        return []
    best = next(plan for plan in plans if plan.step_time_s <= seconds + step_s * _TOLD)  # the lowest level
    level = max(best.zero.values())
    whole = "is of plans that do" if candidates.keeps_whole(answer.config) else "may be of plans that do not"
    return [
        f"with {_DIVIDED[level]} divided over replicas (zero={level}) a step of this plan would take "
        f"{format_seconds(best.step_time_s)} instead of {format_seconds(step_s)}; whole parameters are kept where they "
        f"fit, as some optimizers need them, and the lower bound {whole}"
    ]


def _sizes(tensors: Iterable[TensorInfo]) -> str:
    """Tensors by the pattern of their names, with their bytes."""
    found: dict[str, list[int]] = {}
    for info in tensors:
        found.setdefault(pattern_of(info.name), []).append(math.prod(info.shape) * info.dtype.itemsize)
    return ", ".join(
        f"{name} ({f'{len(sizes)} tensors, ' if len(sizes) > 1 else ''}{format_bytes(sum(sizes))})"
        for name, sizes in found.items()
    )

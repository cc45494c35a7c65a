"""From a plan to the program that runs it: stage graphs, their sharding, sources and manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from autopart.analysis import Analysis, analyze, fold, look_up, pattern_of
from autopart.mixed_precision import SUMS
from autopart.other_model import other_model
from autopart.passes import graph as graphs
from autopart.passes.blocks import block_edges
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut, cut_of, cut_parameters, data_dim
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.emit.program import Emitted, Layout, StageMesh, emit_program
from autopart.passes.emit.segments import is_inside, layer_of_each, segments_of
from autopart.passes.partition import Crossing, StageGraph, partition
from autopart.passes.program import Program, Role
from autopart.passes.rules import RULES, RuleBook, Strategy, compatible
from autopart.passes.rules.applied import JOINT
from autopart.passes.rules.strategies import strategy_named
from autopart.passes.shard import shard_stage
from autopart.passes.unlike_meshes import StageSetting, crossing_placements
from autopart.plan import Plan, StagePlan
from autopart.runtime.errors import BatchError, PlanError
from autopart.runtime.placement import Kind, Placement, Placements, nested


@dataclass(slots=True)
class Realization:
    """The graphs of a plan. stages: whole tensors; local: one rank's part, with collectives."""

    stages: list[StageGraph]
    local: list[fx.Graph]
    crossings: list[Crossing]
    storage: dict[str, Placements]
    axes: Axes
    cuts: dict[str, DataCut]


def build(
    analysis: Analysis,
    boundaries: Sequence[int],
    axes: Axes,
    strategies: Mapping[fx.Node, tuple[Strategy, ...]],
    storage: Mapping[str, Placements],
    cuts: Mapping[str, DataCut] | None = None,
    order: Sequence[int] = (),
) -> Realization:
    """Splits the graph at block boundaries and shards every stage.

    cuts: of parameters, over the data axis. order: of the blocks between which boundaries lie; empty: as numbered.
    """
    blocks = [analysis.blocks[number] for number in order] or analysis.blocks
    stages, crossings = partition(analysis.program, analysis.graph, blocks, boundaries)
    wanted = analysis.whole_outputs
    local = [shard_stage(stage, axes, strategies, storage, analysis.rules, wanted) for stage in stages]
    return Realization(stages, local, crossings, dict(storage), axes, dict(cuts or {}))


def build_unlike(
    analysis: Analysis, boundaries: Sequence[int], settings: Sequence[StageSetting], order: Sequence[int] = ()
) -> Realization:
    """The same, each stage by its own setting."""
    blocks = [analysis.blocks[number] for number in order] or analysis.blocks
    stages, crossings = partition(analysis.program, analysis.graph, blocks, boundaries)
    placed = crossing_placements(crossings, settings)
    local = [
        shard_stage(
            stage, own.axes, own.strategies, own.storage, analysis.rules, analysis.whole_outputs, placed[stage.index]
        )
        for stage, own in zip(stages, settings, strict=True)
    ]
    return Realization(stages, local, crossings, dict(settings[0].storage), settings[0].axes, {})


def axes_of(stage: StagePlan) -> Axes:
    """The tensor axes of a stage that have several ranks."""
    return tuple(axis for axis in stage.mesh[1:] if axis[1] > 1)


def settings_of(analysis: Analysis, plan: Plan) -> list[StageSetting]:
    """How each stage of a plan is divided. Raises PlanError for strategies that a stage's ops do not offer."""
    found: list[StageSetting] = []
    for index, stage in enumerate(plan.stages):
        if plan.is_uniform and found:
            found.append(found[0])
            continue
        axes = axes_of(stage)
        own = replace(plan, strategies=stage.strategies or plan.strategies, storage=stage.storage or plan.storage)
        try:
            strategies, storage = read_strategies(analysis, own, axes)
        except PlanError as error:
            raise PlanError(f"stages[{index}]: {error}; a stage may have strategies and storage of its own") from error
        found.append(StageSetting(stage.dp, axes, strategies, storage, stage.shares))
    return found


def strategy_names(analysis: Analysis, strategies: Mapping[fx.Node, tuple[Strategy, ...]]) -> dict[str, str]:
    """Strategies as a plan writes them: by folded op name, axes joined with commas, replicated ops left out."""
    named = {analysis.keys[node]: ",".join(item.name for item in chosen) for node, chosen in strategies.items()}
    return {name: text for name, text in fold(named).items() if set(text.split(",")) != {"R"}}


def storage_names(analysis: Analysis, storage: Mapping[str, Placements]) -> dict[str, str]:
    """Storage as a plan writes it: by folded name, replicated ones left out; what no op reads is not in it."""
    named = {name: ",".join(map(str, storage.get(name, ["R"]))) for name in analysis.program.tensors}
    return {name: text for name, text in fold(named).items() if set(text.split(",")) != {"R"}}


def level_names(analysis: Analysis, levels: Mapping[str, int]) -> dict[str, int]:
    """Levels of ZeRO as a plan writes them: by folded parameter name, those at 0 left out."""
    named = {info.name: levels.get(info.name, 0) for info in analysis.program.parameters}
    return {name: level for name, level in fold(named).items() if level}


def read_strategies(
    analysis: Analysis, plan: Plan, axes: Axes
) -> tuple[dict[fx.Node, tuple[Strategy, ...]], dict[str, Placements]]:
    """A plan's strategies and storage as objects. Raises PlanError for names that the ops do not offer."""
    if not axes:
        return {}, {}
    strategies: dict[fx.Node, tuple[Strategy, ...]] = {}
    for node in analysis.block_of:
        strategies[node] = read_strategy(analysis, node, look_up(plan.strategies, analysis.keys[node]), axes)
    known = set(analysis.keys.values())
    patterns = set(fold(dict.fromkeys(known, "")))
    for name in plan.strategies:
        if name not in known and name not in patterns:
            raise PlanError(f"strategies[{name!r}]: the model has no such op")
    return strategies, read_storage(analysis, plan, axes, strategies)


def read_strategy(analysis: Analysis, node: fx.Node, text: str | None, axes: Axes) -> tuple[Strategy, ...]:
    """An op's strategies on the axes by their names; replicated without. Raises PlanError for what is not offered."""
    key, sizes = analysis.keys[node], tuple(parts for _, parts in axes)
    names = (text or ",".join("R" for _ in axes)).split(",")
    if len(names) != len(axes):
        raise PlanError(f"strategies[{key!r}]: {len(names)} strategies for {len(axes)} tensor axes")
    if any(name.startswith(JOINT) for name in names):
        return _joint(analysis, node, tuple(names), sizes)
    chosen = []
    for index, (name, (axis, parts)) in enumerate(zip(names, axes, strict=True)):
        others = [*sizes[:index], *sizes[index + 1 :]]
        offered = {item.name: item for item in analysis.strategies(parts, others)[node]}
        # ops that repeat take one strategy, of which each may be offered others: what is around it differs
        found = offered.get(name) or strategy_named(node, name, parts, analysis.rules)
        if found is None:
            raise PlanError(
                f"strategies[{key!r}]: {name!r} is not offered on axis {axis} of {parts}; one of {', '.join(offered)}"
            )
        chosen.append(found)
    if not compatible(node, chosen, sizes, analysis.rules):
        raise PlanError(
            f"strategies[{key!r}]: {text} do not hold together on axes of {sizes}; a factor sharded on two axes "
            "is sharded inside the shares of the other on one of them, such as n and n/2"
        )
    return tuple(chosen)


def _joint(analysis: Analysis, node: fx.Node, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
    """The tuple with these names, of those in which two axes act together."""
    offered = {tuple(item.name for item in chosen): chosen for chosen in analysis.joint_strategies(sizes).get(node, ())}
    if names not in offered:
        known = "; ".join(",".join(found) for found in offered) or "none"
        raise PlanError(
            f"strategies[{analysis.keys[node]!r}]: {','.join(names)!r} is not offered on axes of {sizes}; "
            f"panel by panel there is {known}"
        )
    return offered[names]


def read_storage(
    analysis: Analysis, plan: Plan, axes: Axes, strategies: Mapping[fx.Node, tuple[Strategy, ...]]
) -> dict[str, Placements]:
    """A plan's storage as placements, replicated where it says nothing. Raises PlanError where that cannot be."""
    tensors = analysis.program.tensors
    patterns = {pattern_of(name) for name in tensors}
    for name in plan.storage:
        if name not in tensors and name not in patterns:
            raise PlanError(f"storage[{name!r}]: the model has no such parameter")
    storage: dict[str, Placements] = {}
    for name, info in tensors.items():
        text = look_up(plan.storage, name) or ",".join("R" for _ in axes)
        placements = tuple(Placement.parse(item.strip()) for item in text.split(","))
        if len(placements) != len(axes):
            raise PlanError(f"storage[{name!r}]: {len(placements)} placements for {len(axes)} tensor axes")
        for placement, (axis, parts) in zip(placements, axes, strict=True):
            partial = placement.kind is Kind.PARTIAL or placement.is_routed
            if partial or (placement.kind is Kind.BROADCAST and not info.trainable):
                raise PlanError(f"storage[{name!r}]: {placement} is no way to store it; use R, S<dim> or, trained, B")
            if placement.is_shard:
                size = info.shape[placement.dim] if placement.dim < len(info.shape) else 0
                if placement.batched or size == 0 or size % (placement.outer * parts):
                    raise PlanError(
                        f"storage[{name!r}]: {placement} does not divide its shape {list(info.shape)} on axis {axis} "
                        f"of {parts}"
                    )
        if not nested(placements, [parts for _, parts in axes]):
            raise PlanError(
                f"storage[{name!r}]: {text}: a dim sharded on two axes is sharded inside the shares of the other on "
                "one of them, such as S0 and S0/2"
            )
        storage[name] = placements
    for node, chosen in strategies.items():
        if not graphs.updates_statistics(node):
            continue
        for index, source in enumerate(graphs.input_nodes(node)):
            used = tuple(strategy.inputs[index] for strategy in chosen)
            if (
                source.op == "placeholder"
                and source.meta["role"] is Role.BUFFER
                and storage[source.meta["name"]] != used
            ):
                raise PlanError(
                    f"storage[{source.meta['name']!r}]: {analysis.keys[node]} updates it as {_text(used)}, "
                    "so it has to be stored like that"
                )
    return storage


def read_zero(
    analysis: Analysis, plan: Plan, settings: Sequence[StageSetting], homes: Mapping[str, Sequence[int]]
) -> dict[str, DataCut]:
    """What replicas divide between them. homes: the stages that hold each parameter; only asked where meshes differ.

    Raises PlanError for what the model lacks or what cannot be divided.
    """
    tensors = {info.name: info for info in analysis.program.parameters}
    patterns = {pattern_of(name) for name in tensors}
    for name in plan.zero:
        if name not in tensors and name not in patterns:
            raise PlanError(f"zero[{name!r}]: the model has no such parameter")
    levels = {name: look_up(plan.zero, name) or 0 for name in tensors}
    if plan.schedule == "2bw" and any(levels.values()):
        raise PlanError("zero: the schedule 2bw keeps two versions of whole weights; leave zero out, or use 2bw-flush")
    cuts: dict[str, DataCut] = {}
    for name, level in levels.items():
        if not level:
            continue
        own = settings[0]
        if not plan.is_uniform:
            stages = homes.get(name, ())
            if len(stages) > 1:
                raise PlanError(
                    f"zero[{name!r}]: stages {', '.join(map(str, stages))} share it and have unlike meshes, so it "
                    "stays whole; leave it out"
                )
            own = settings[stages[0]] if stages else own
            if own.dp == 1:
                continue  # a pattern may mean layers on other stages as well
        if data_dim(tensors[name], own.storage.get(name, ()), own.axes, own.dp) is None:
            raise PlanError(
                f"zero[{name!r}]: no dim of its share of {list(tensors[name].shape)} divides by {own.dp} replicas; "
                "leave it out"
            )
        cuts |= cut_parameters(tensors, own.storage, own.axes, own.dp, {name: level})
    return cuts


def _text(placements: Placements) -> str:
    return ",".join(map(str, placements))


def check_fingerprint(program: Program, plan: Plan) -> None:
    """Raises PlanError when the plan was made for another model, other sizes, or other sums of gradients."""
    if plan.fingerprint == program.fingerprint:
        return
    sums = planned_sums(program, plan)
    if sums is not None:
        raise PlanError(
            f"the plan was made for gradients that are added up in {sums or 'their own types'} (or before plans told "
            f"that apart), the program adds them up in {program.reduce_dtype or 'their own types'}, which has other "
            f"prices; capture with reduce_dtype={sums!r}, or plan again"
        )
    raise PlanError(other_model(program, plan))


def planned_sums(program: Program, plan: Plan) -> str | None:
    """The ``reduce_dtype`` that a plan of this program was made for; None where it is another program's."""
    return next((sums for sums in ("", *SUMS) if plan.fingerprint == program.fingerprint_under(sums)), None)


def check_plan(program: Program, analysis: Analysis, plan: Plan) -> None:
    """Raises PlanError when the plan was made for another model or other blocks, BatchError for a mixing model."""
    check_fingerprint(program, plan)
    last = plan.stages[-1].blocks[1]
    if last != len(analysis.blocks):
        raise PlanError(f"stages: the plan ends at block {last}, the model has {len(analysis.blocks)}; plan it again")
    home = {block: stage for stage in range(len(plan.stages)) for block in plan.blocks_of(stage)}
    for source, target in block_edges(analysis.blocks):
        if home[source] > home[target]:
            raise PlanError(
                f"order: block {target} on stage {home[target]} reads what block {source} on stage {home[source]} "
                "makes; values go to later stages only"
            )
    if analysis.split.flaw and (plan.dp > 1 or plan.microbatches > 1):
        raise BatchError(
            f"the batch may not be split: {analysis.split.flaw}; "
            "use one replica and one microbatch (dp=1, microbatches=1)"
        )


def realized(analysis: Analysis, plan: Plan) -> Realization:
    """The graphs of a plan. Raises as :func:`realize` does."""
    check_plan(analysis.program, analysis, plan)
    return sharded(analysis, plan, settings_of(analysis, plan))


def sharded(analysis: Analysis, plan: Plan, settings: Sequence[StageSetting]) -> Realization:
    """The graphs of a plan that :func:`check_plan` passes. settings: of its stages, by :func:`settings_of`."""
    own = settings[0]
    if not plan.is_uniform:
        found = build_unlike(analysis, plan.boundaries, settings, plan.order)
        return replace(found, cuts=read_zero(analysis, plan, settings, _homes(found.local)))
    cuts = read_zero(analysis, plan, settings, {})
    return build(analysis, plan.boundaries, own.axes, own.strategies, own.storage, cuts, plan.order)


def _homes(local: Sequence[fx.Graph]) -> dict[str, list[int]]:
    """The stages that read each parameter."""
    found: dict[str, list[int]] = {}
    for stage, graph in enumerate(local):
        for node in graph.nodes:
            if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER:
                found.setdefault(node.meta["name"], []).append(stage)
    return found


def recomputed(plan: Plan, local: Sequence[fx.Graph]) -> tuple[frozenset[str], ...]:
    """What each stage computes again: paths of layers and of modules in them; ``local``: one rank's graph of each.

    Raises PlanError for what its stage does not have, or what may not run twice or not by itself.
    """
    found = []
    for index, (stage, graph) in enumerate(zip(plan.stages, local, strict=True)):
        if plan.recompute != "some":
            found.append(frozenset(recomputable_layers(graph) if plan.recompute == "full" else ()))
            continue
        where, offered = f"stages[{index}].recompute", layer_of_each(graph)
        for path in stage.recompute:
            if path not in offered:
                raise PlanError(
                    f"{where}: {path!r} is no layer of this stage, or module in one, that can be computed again; "
                    f"it has {', '.join(offered) or 'none'}"
                )
            own = [other for other in stage.recompute if other != path and offered.get(other) == offered[path]]
            around = [other for other in own if is_inside(path, other)]
            if around:
                raise PlanError(f"{where}: {path!r} lies in {around[0]!r}, which is computed again; name one of them")
        apart = {own.path for _, _, parts in segments_of(graph, stage.recompute) for own in parts}
        missing = [path for path in stage.recompute if path not in apart]
        if missing:
            raise PlanError(f"{where}: the ops of {missing[0]!r} lie between those of others named there; leave it out")
        found.append(frozenset(stage.recompute))
    return tuple(found)


def _check_gathered(cuts: Mapping[str, DataCut], local: Sequence[fx.Graph], paths: Sequence[Collection[str]]) -> None:
    """A layer that runs again gathers its weights again; a module in one would be given them, and keep them."""
    for index, (graph, own) in enumerate(zip(local, paths, strict=True)):
        for run, _, parts in segments_of(graph, own):
            for part in parts:
                read = (source for node in part.nodes for source in node.all_input_nodes)
                found = [source for source in read if (cut := cut_of(source, cuts)) is not None and cut.level == 3]
                if part.path not in ("", run.path) and found:
                    raise PlanError(
                        f"stages[{index}].recompute: {part.path!r} reads {found[0].meta['name']!r}, which is at ZeRO "
                        "level 3 and gathered by layer; name the whole layer"
                    )


def realize(program: Program, plan: Plan, analysis: Analysis | None = None, rules: RuleBook = RULES) -> Emitted:
    """The program of a plan, as sources and a manifest. rules: those that the plan was made with.

    Raises PlanError when the plan does not belong to the program, BatchError when it splits a batch that may not be.
    """
    if not isinstance(program, Program):
        raise PlanError(f"emitted is a Program that capture gives, not a {type(program).__name__}")
    if not isinstance(plan, Plan):
        raise PlanError(f"a program is emitted by a Plan, such as Plan.load('plan.json'), not a {type(plan).__name__}")
    analysis = analysis or analyze(program, rules, plan.example_batch)
    check_plan(analysis.program, analysis, plan)
    settings = settings_of(analysis, plan)
    found = sharded(analysis, plan, settings)
    again = recomputed(plan, found.local)
    _check_gathered(found.cuts, found.local, again)
    order = {device: rank for rank, device in enumerate(sorted({d for stage in plan.stages for d in stage.devices}))}
    layout = Layout(
        devices=tuple(tuple(order[device] for device in stage.devices) for stage in plan.stages),
        dp=settings[0].dp,
        axes=found.axes,
        schedule=plan.schedule,
        warmup=plan.warmup,
        microbatches=plan.microbatches,
        recompute=again,
        invariant_dropout=plan.dropout == "invariant",
        cuts=found.cuts,
        bucket_bytes=plan.bucket_bytes,
        headings=tuple(_heading(program, plan, index) for index in range(len(plan.stages))),
        unlike=()
        if plan.is_uniform
        else tuple(StageMesh(item.dp, item.axes, item.storage, item.shares) for item in settings),
    )
    emitted = emit_program(program, analysis.split, found.stages, found.local, found.crossings, found.storage, layout)
    return replace(
        emitted,
        manifest=replace(
            emitted.manifest,
            tokens_per_sample=plan.tokens // plan.batch,
            flops_per_sample=plan.flops / plan.batch,
            peak_flops=plan.peak_flops,
        ),
    )


def _heading(program: Program, plan: Plan, index: int) -> tuple[str, ...]:
    stage = plan.stages[index]
    mesh = " x ".join(f"{name} {size}" for name, size in stage.mesh)
    numbers = plan.blocks_of(index)
    blocks = ", ".join(map(str, numbers)) if plan.order else f"{numbers[0]} to {numbers[-1]}"
    one = f"one of {plan.microbatches} microbatches" if plan.microbatches > 1 else "the only microbatch"
    return (
        f"Stage {index} of {len(plan.stages)} of {program.name}: blocks {blocks}.",
        "",
        f"Mesh {mesh}; {one} ({plan.schedule}). Emitted by autopart; may be edited.",
    )


def emit(program: Program, plan: Plan, directory: str | Path, rules: RuleBook = RULES) -> None:
    """Writes the program of a plan to a folder: ``stage_*.py``, ``manifest.json``, the plan itself.

    rules: those that the plan was made with.

    Raises what :func:`realize` raises, and PlanError when the folder holds something else.
    """
    emitted = realize(program, plan, rules=rules)
    emitted.files["plan.json"] = plan.to_json()
    emitted.save(Path(directory))

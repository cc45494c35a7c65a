"""The emitted program: stage files, totals, and the manifest that the runtime reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.batch import BatchSplit
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut
from autopart.passes.emit.folder import program_folder
from autopart.passes.emit.source import StageSource
from autopart.passes.emit.totals import conditions_source, totals_source
from autopart.passes.outline import outline_digest
from autopart.passes.partition import Crossing, StageGraph
from autopart.passes.program import Program, Role, TensorInfo, reached_by_gradients
from autopart.passes.shard import local_extents
from autopart.passes.sizes import Extent, extent
from autopart.passes.written import running_statistics
from autopart.runtime.errors import PlanError
from autopart.runtime.loading import CONSTANTS_FILE
from autopart.runtime.manifest import AssumptionSpec, Manifest, OutputSpec, ParameterSpec, Size, StageSpec, ValueSpec
from autopart.runtime.placement import REPLICATE, Kind, Placements


@dataclass(slots=True)
class Emitted:
    """Texts by file name, the manifest, and tensors that no state dict holds."""

    files: dict[str, str]
    manifest: Manifest
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        """Writes the program; one that is there is replaced once everything is written. Raises PlanError."""
        with program_folder(Path(directory)) as folder:
            for name, text in self.files.items():
                (folder / name).write_text(text)
            if self.constants:
                # through a file of its own: of a full disk torch says nothing that can be read
                with (folder / CONSTANTS_FILE).open("wb") as file:
                    torch.save(self.constants, file)
            self.manifest.save(folder)


@dataclass(frozen=True, slots=True)
class StageMesh:
    """One stage's own mesh, where stages differ. shares: parts of the replicas; storage: of parameters by name."""

    dp: int
    axes: Axes
    storage: Mapping[str, Placements]
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What a plan decides that the graphs do not show: who runs a stage, and the schedule.

    devices: ranks of each stage, row-major over (dp, tensor axes). dp: size of the data axis.
    recompute: the layers of each stage that are computed again in the backward.
    headings: first lines of each stage's docstring. unlike: the mesh of each stage; empty: dp and axes for all.
    cuts: of the parameters that are divided over the data axis. bucket_bytes: as of the manifest.
    """

    devices: tuple[tuple[int, ...], ...]
    dp: int
    axes: Axes
    schedule: str
    microbatches: int
    recompute: tuple[frozenset[str], ...]
    headings: tuple[tuple[str, ...], ...]
    warmup: tuple[int, ...] = ()
    invariant_dropout: bool = False
    cuts: Mapping[str, DataCut] = field(default_factory=dict, hash=False)
    unlike: tuple[StageMesh, ...] = ()
    bucket_bytes: int = 0

    def mesh_of(self, stage: int, storage: Mapping[str, Placements]) -> StageMesh:
        return self.unlike[stage] if self.unlike else StageMesh(self.dp, self.axes, storage)


def emit_program(
    program: Program,
    split: BatchSplit,
    stages: Sequence[StageGraph],
    graphs_by_stage: Sequence[fx.Graph],
    crossings: Sequence[Crossing],
    storage: Mapping[str, Placements],
    layout: Layout,
) -> Emitted:
    """Sources and manifest. ``graphs_by_stage``: one rank's graph per stage (shard_stage)."""
    totals_buffers = _names(split.totals, Role.BUFFER) if split.totals is not None else ()
    homes = _homes(program, stages, graphs_by_stage, totals_buffers)
    evaluated = program.evaluation.writes
    parameters = tuple(
        replace(spec, evaluated=spec.name in evaluated)
        for spec in parameter_specs(program, split, stages, graphs_by_stage, storage, layout)
    )
    files: dict[str, str] = {}
    specs: list[StageSpec] = []
    for stage, graph in zip(stages, graphs_by_stage, strict=True):
        tensors = {name: info for name, info in program.tensors.items() if stage.index in homes[name]}
        name = f"stage_{stage.index}.py"
        mesh = layout.mesh_of(stage.index, storage)
        source = StageSource(
            graph,
            mesh.axes,
            tensors,
            layout.headings[stage.index],
            len(stage.sends) + len(stage.outputs),
            stage.updates,
            layout.recompute[stage.index],
            f"stage_{stage.index}",
            layout.invariant_dropout,
            layout.cuts,
            mesh.dp,
            evaluated,
        )
        files[name] = source.write()
        roles = {role: _names(graph, role) for role in (Role.INPUT, Role.RECEIVED, Role.TOTAL)}
        specs.append(
            StageSpec(
                file=name,
                devices=layout.devices[stage.index],
                mesh=(("dp", mesh.dp), *mesh.axes),
                inputs=roles[Role.INPUT],
                receives=roles[Role.RECEIVED],
                totals=roles[Role.TOTAL],
                sends=stage.sends,
                outputs=stage.outputs,
                shares=mesh.shares,
            )
        )
    totals_inputs: tuple[str, ...] = ()
    if split.totals is not None:
        totals_inputs = _names(split.totals, Role.INPUT)
        files["totals.py"] = totals_source(split.totals, split.total_names)
    assumption_inputs: tuple[str, ...] = ()
    if program.conditions is not None:
        assumption_inputs = _names(program.conditions, Role.INPUT)
        files["assumptions.py"] = conditions_source(program.conditions)
    manifest = Manifest(
        fingerprint=program.fingerprint,
        world_size=len({device for devices in layout.devices for device in devices}),
        schedule=layout.schedule,
        warmup=layout.warmup,
        microbatches=layout.microbatches,
        stages=tuple(specs),
        values=tuple(_values(stages, graphs_by_stage, crossings, layout, split)),
        inputs=program.inputs,
        outputs=tuple(_outputs(program, split, stages, graphs_by_stage)),
        parameters=parameters,
        parameter_order=tuple(info.name for info in program.parameters),
        input_names=program.input_names,
        arguments=program.arguments,
        loss=program.loss,
        totals=split.total_names,
        totals_inputs=totals_inputs,
        totals_buffers=totals_buffers,
        output_structure=program.output_structure,
        batch_splittable=not split.flaw,
        imports=program.imports,
        notes=(*program.notes, *split.notes),
        eval_flaw=program.eval_flaw,
        no_grad_flaw=program.evaluation.no_grad_flaw,
        precision=program.precision,
        outline=outline_digest(split.graph, program.updated_buffers),
        assumptions=tuple(AssumptionSpec(item.value, item.text) for item in program.assumptions),
        assumption_inputs=assumption_inputs,
        fixed_batch=program.batch if program.static_batch else 0,
        most_samples=program.most_samples,
        bucket_bytes=layout.bucket_bytes,
    )
    return Emitted(files, manifest, dict(program.constants))


def _names(graph: fx.Graph, role: Role) -> tuple[str, ...]:
    return tuple(node.meta["name"] for node in graph.nodes if node.op == "placeholder" and node.meta["role"] is role)


def _homes(
    program: Program, stages: Sequence[StageGraph], stage_graphs: Sequence[fx.Graph], totals_buffers: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter and buffer; one that nothing uses is kept on the first.

    A stage that makes a buffer's new value holds it; those that use totals hold what these are computed from.
    """
    found: dict[str, list[int]] = {name: [] for name in program.tensors}
    for index, (stage, graph) in enumerate(zip(stages, stage_graphs, strict=True)):
        for name in dict.fromkeys((*_names(graph, Role.PARAMETER), *_names(graph, Role.BUFFER), *stage.updates)):
            found[name].append(index)
        if _names(graph, Role.TOTAL):
            for name in totals_buffers:
                if index not in found[name]:
                    found[name].append(index)
    return {name: tuple(stages) or (0,) for name, stages in found.items()}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(sizes: Sequence[Extent | None], what: str, instead: str = "use fewer stages") -> tuple[Size, ...]:
    found: list[Size] = []
    for size in sizes:
        if size is None:
            raise PlanError(f"{what} has a size that is no multiple of the batch size; {instead}")
        found.append(str(size) if size.batched else size.coefficient)
    return tuple(found)


def _values(
    stages: Sequence[StageGraph],
    stage_graphs: Sequence[fx.Graph],
    crossings: Sequence[Crossing],
    layout: Layout,
    split: BatchSplit,
) -> list[ValueSpec]:
    specs = []
    for crossing in crossings:
        node = graphs.results(stage_graphs[crossing.source])[stages[crossing.source].sends.index(crossing.name)]
        axes = layout.mesh_of(crossing.source, {}).axes
        sizes = local_extents(node.meta["val"], node.meta["placements"], axes)
        whole = [extent(size) for size in node.meta["val"].shape]
        arrivals = [_arrival(stage_graphs[target], crossing.name) for target in crossing.targets]
        specs.append(
            ValueSpec(
                name=crossing.name,
                shape=_sizes(sizes, f"the value {crossing.name} between stages"),
                dtype=_dtype(node.meta["val"].dtype),
                source=crossing.source,
                targets=crossing.targets,
                needs_grad=bool(node.meta.get("differentiable")) and graphs.may_have_gradient(node.meta["val"].dtype),
                whole=_sizes(whole, f"the value {crossing.name} between stages"),
                batch_dim=_batch_dim(crossing, layout, split),
                placements=tuple(map(str, node.meta["placements"])),
                arrivals=tuple(arrivals),
            )
        )
    return specs


def _arrival(graph: fx.Graph, name: str) -> tuple[str, ...]:
    """How a stage expects a value."""
    received = (n for n in graph.nodes if n.op == "placeholder" and n.meta["role"] is Role.RECEIVED)
    return next(tuple(map(str, node.meta["placements"])) for node in received if node.meta["name"] == name)


def _batch_dim(crossing: Crossing, layout: Layout, split: BatchSplit) -> int | None:
    """The dim with a value's samples. Raises PlanError where unlike replicas cannot be given their parts of it."""
    state = crossing.value.node.meta.get("batch", REPLICATE)
    state = state[crossing.value.index] if isinstance(state, tuple) else state
    meshes = [layout.mesh_of(stage, {}) for stage in (crossing.source, *crossing.targets)]
    unlike = len({(mesh.dp, mesh.shares) for mesh in meshes}) > 1 and not split.flaw
    if unlike and (state.kind is Kind.PARTIAL or (state.is_shard and (state.outer != 1 or state.batched))):
        how = "is a sum over samples" if state.kind is Kind.PARTIAL else "has its samples inside other blocks"
        raise PlanError(
            f"the value {crossing.name} crosses between stages with unlike replicas and {how}; give stages "
            f"{crossing.source} and {', '.join(map(str, crossing.targets))} the same data axis, or cut elsewhere"
        )
    return state.dim if state.is_shard else None


def _outputs(
    program: Program, split: BatchSplit, stages: Sequence[StageGraph], stage_graphs: Sequence[fx.Graph]
) -> list[OutputSpec]:
    specs = []
    for info in program.outputs:
        if info.node is None:
            specs.append(
                OutputSpec(info.name, 0, "constant", constant=info.constant, kind=info.kind, per_sample=info.per_sample)
            )
            continue
        kind, dim, blocks = split.combine[info.name]
        stage = next(stage.index for stage in stages if info.name in stage.outputs)
        value = info.node.meta["val"]
        shape = _sizes(
            [extent(item) for item in value.shape],
            f"the output {info.name!r}",
            "where values decide it (h[mask]), let forward return all entries and the mask, and choose in the script",
        )
        result = graphs.results(stage_graphs[stage])[len(stages[stage].sends) + stages[stage].outputs.index(info.name)]
        placements = tuple(map(str, result.meta["placements"]))
        dtype, gradient = _dtype(value.dtype), info.differentiable
        specs.append(OutputSpec(info.name, stage, kind, shape, dtype, dim, blocks, None, placements, gradient))
    return specs


def parameter_specs(
    program: Program,
    split: BatchSplit,
    stages: Sequence[StageGraph],
    graphs_by_stage: Sequence[fx.Graph],
    storage: Mapping[str, Placements],
    layout: Layout,
) -> tuple[ParameterSpec, ...]:
    """How every parameter and buffer is stored, in the model's order."""
    totals = _names(split.totals, Role.BUFFER) if split.totals is not None else ()
    homes = _homes(program, stages, graphs_by_stage, totals)
    learning = learning_stages(program, stages, graphs_by_stage)
    once = {*program.updated_buffers}
    updated = once | running_statistics(program.graph)
    for name in updated:
        if len(homes[name]) > 1:
            raise PlanError(
                f"the buffer {name} is written in training, and stages {', '.join(map(str, homes[name]))} would each "
                "hold one of their own; cut elsewhere, or use fewer stages"
            )
    return tuple(
        replace(
            _parameter(info, homes, storage, program, layout, layout.cuts.get(info.name), learning),
            mutated=info.name in updated,
            once=info.name in once,
            combine=split.updates.get(info.name, ""),
        )
        for info in program.tensors.values()
    )


def _parameter(
    info: TensorInfo,
    homes: Mapping[str, tuple[int, ...]],
    storage: Mapping[str, Placements],
    program: Program,
    layout: Layout,
    cut: DataCut | None,
    learning: Mapping[str, tuple[int, ...]],
) -> ParameterSpec:
    by_stage = []
    for stage in homes[info.name]:
        mesh = layout.mesh_of(stage, storage)
        found = mesh.storage.get(info.name)
        by_stage.append(tuple(map(str, found)) if found else ("R",) * len(mesh.axes))
    meshes = {(mesh.dp, mesh.axes) for mesh in (layout.mesh_of(stage, storage) for stage in homes[info.name])}
    divided = any(text.startswith("S") for texts in by_stage for text in texts)
    if info.trainable and divided and (len(meshes) > 1 or len(set(by_stage)) > 1):
        raise PlanError(
            f"{info.name} is used by stages {', '.join(map(str, homes[info.name]))} with unlike meshes and stored in "
            "shares; store it whole (R or B) on each, or give these stages the same mesh"
        )
    return ParameterSpec(
        name=info.name,
        shape=info.shape,
        dtype=_dtype(info.dtype),
        stages=homes[info.name],
        placements=by_stage[0],
        by_stage=tuple(by_stage) if layout.unlike else (),
        aliases=info.aliases,
        trainable=info.trainable,
        buffer=info.buffer,
        persistent=info.persistent,
        zero=cut.level if cut else 0,
        data_dim=cut.dim if cut else 0,
        gradients=learning.get(info.name, ()),
        summed=program.reduce_dtype if info.trainable and not info.buffer else "",
    )


def learning_stages(
    program: Program, stages: Sequence[StageGraph], stage_graphs: Sequence[fx.Graph]
) -> dict[str, tuple[int, ...]]:
    """The stages in which a gradient reaches each parameter."""
    found: dict[str, list[int]] = {}
    for stage, graph in zip(stages, stage_graphs, strict=True):
        for node in reached_by_gradients(gradient_roots(program, stage, graph)):
            if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER:
                found.setdefault(node.meta["name"], []).append(stage.index)
    return {name: tuple(sorted(indices)) for name, indices in found.items()}


def gradient_roots(program: Program, stage: StageGraph, graph: fx.Graph) -> list[fx.Node]:
    """Where gradients enter a stage: the loss (all outputs, where the script computes it), and what is sent on."""
    names = [*stage.sends, *stage.outputs]
    wanted = {*stage.sends, *(stage.outputs if program.loss is None else (program.loss,))}
    return [node for name, node in zip(names, graphs.results(graph), strict=False) if name in wanted]

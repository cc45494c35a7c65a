"""The plan of a solved candidate, timed on the graphs that will be emitted.

Times, collectives and parameter counts come from every stage's own graph; memory and the work at the end of a step
from the blocks' estimates (:mod:`autopart.candidates`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopart.analysis import fold
from autopart.candidates import Answer, Candidates
from autopart.cost.communication import send_seconds
from autopart.device_layout import TENSOR_AXIS
from autopart.exchanges import exchanges
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.beside import products_beside
from autopart.passes.conversion import Axes
from autopart.passes.data_axis import DataCut, cut_parameters
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.emit.segments import recomputable
from autopart.passes.graph import Value
from autopart.passes.kept import rerun
from autopart.passes.partition import StageGraph
from autopart.passes.program import Role
from autopart.passes.shard import value_placements
from autopart.plan import Plan, StagePlan, Transfers
from autopart.predict import simulate_plan
from autopart.prices import Chosen, share_of
from autopart.realize import Realization, build, storage_names, strategy_names
from autopart.runtime.manifest import MIXED
from autopart.solver.search import Config, Degrees
from autopart.solver.stages_problem import StageProblem, Way
from autopart.step_time import step_end_seconds
from autopart.tensor_choice import Setting, TensorChoice


def describe(candidates: Candidates, answer: Answer) -> Plan:
    """The plan, without the search's account of bounds and alternatives."""
    analysis, config, choice = candidates.analysis, answer.config, answer.choice
    axes, problem = candidates.layout.axes(config), answer.problem
    boundaries, order = problem.boundaries(answer.cut.way), problem.order(answer.cut.way)
    cuts = cut_parameters(analysis.program.tensors, choice.storage, axes, config.dp, choice.levels)
    found = build(analysis, boundaries, axes, choice.strategies, choice.storage, cuts, order)
    places = candidates.layout.places(config)
    again, recompute = recomputed(candidates, config, answer.cut.way, problem, found)
    exchanged = exchanges(analysis, found, config.dp, candidates.samples(config), again, places)
    stages = []
    for index, (stage, graph) in enumerate(zip(found.stages, found.local, strict=True)):
        first, last = boundaries[index], boundaries[index + 1]
        times = Clock(candidates, config, stage, graph, choice, again[index]).seconds()
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
                weight_s=times.backward_s * candidates.weight_share(config, answer.cut.way[index], problem),
                memory_bytes=round(problem.stage_bytes(index, answer.cut.way[index])),
                capacity_bytes=candidates.layout.capacity(config, index),
                parameters=held_numbers(graph, axes, found.cuts, config.dp),
                collectives=exchanged[index].microbatch,
                step_end_s=step_end_seconds(problem, answer.cut.way[index], config.schedule),
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
        tied_s=problem.tied_seconds(answer.cut.way),
        strategies=strategy_names(analysis, choice.strategies),
        storage=storage_names(choice.storage),
        recompute=recompute,
        zero=fold(choice.levels),
        warmup=candidates.warmup_of(config),
        order=order if order != tuple(range(len(order))) else (),
    )


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
    order: tuple[int, ...] = (),
) -> Plan:
    """The plan of these stages with the step's simulated seconds."""
    analysis, program = candidates.analysis, candidates.analysis.program
    plan = Plan(
        fingerprint=program.fingerprint,
        model=program.name,
        cluster=str(candidates.cluster),
        batch=candidates.batch,
        dtype=program.precision or str(analysis.dtype).removeprefix("torch."),
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
    )
    return replace(plan, step_time_s=simulate_plan(plan).makespan_s + plan.tied_s)


def recomputed(
    candidates: Candidates, config: Config, way: Way, problem: StageProblem, found: Realization
) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The layers, and modules in layers, that each stage runs again in the backward, and how a plan calls that."""
    layers = tuple(recomputable_layers(graph) for graph in found.local)
    if config.recompute == "full":
        return layers, "full"
    chosen = [candidates.computed_again(config, step, problem) for step in way]
    again = tuple(
        tuple(path for path in recomputable(graph) if path in own)
        for graph, own in zip(found.local, chosen, strict=True)
    )
    return again, "none" if not any(again) else "full" if again == layers else "some"


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one microbatch. hidden_s: by kind what of collectives passes beside weights' gradients, uncounted."""

    forward_s: float
    backward_s: float
    hidden_s: Mapping[str, float]


@dataclass(slots=True)
class Clock:
    """Seconds of one stage's sharded graph, collectives and free ops included."""

    candidates: Candidates
    config: Degrees
    stage: StageGraph
    graph: fx.Graph
    choice: TensorChoice
    recompute: Collection[str]  # layers and modules in them that run again in the backward

    def seconds(self) -> StageSeconds:
        candidates, config = self.candidates, self.config
        again = rerun(self.graph, self.recompute)
        setting = candidates.setting(config)
        sizes = dict(candidates.layout.axes(config))
        numbers = {name: index for index, name in enumerate(sizes)}
        origins = self._origins()
        beside = products_beside(self.graph, self.recompute) if setting.beside else {}
        hidden: dict[str, float] = {}
        forward = backward = 0.0
        for node in self.stage.graph.nodes:
            if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER:
                one, two = candidates.data_seconds(config, self.choice, self.stage.origin[node])
                forward, backward = forward + one, backward + two
        for node in self.graph.nodes:
            if "transition" in node.meta:
                axis, step = node.meta["transition"]
                gradient = bool(node.meta.get("differentiable"))
                price = setting.conversions.step(numbers[axis], step.source, step.target, gradient)
                size = value_bytes(Value(node)).at(setting.prices.batch)
                # what the other axes leave; this one's ranks have or get it whole
                others = [1 if name == axis else parts for name, parts in sizes.items()]
                one, two = price.seconds(size * share_of(node.args[0].meta["placements"], others))
                products = [origins[product] for product in beside.get(node, ())]
                weights = (setting.prices.weight_seconds(op, self._chosen(op), setting.sizes) for op in products)
                if products:
                    unseen = min(two, sum(weights))
                    hidden[step.backward] = hidden.get(step.backward, 0.0) + unseen
                    two -= unseen
            elif node in origins:
                one, two = self._op(node, origins[node], setting)
            else:
                continue
            forward += one
            backward += two + (one if node in again else 0.0)
        return StageSeconds(forward, backward, hidden)

    def _origins(self) -> dict[fx.Node, fx.Node]:
        """The whole graph's op for every op of the sharded graph, which keeps their order and adds collectives."""
        kept = [node for node in self.graph.nodes if graphs.is_op(node) and "transition" not in node.meta]
        before = [node for node in self.stage.graph.nodes if graphs.is_op(node)]
        return {local: self.stage.origin[node] for node, local in zip(before, kept, strict=True)}

    def _chosen(self, origin: fx.Node) -> Chosen:
        return self.choice.strategies.get(origin, ())

    def _op(self, node: fx.Node, origin: fx.Node, setting: Setting) -> tuple[float, float]:
        chosen = self._chosen(origin) if node.meta.get("strategies") else ()
        if not chosen:
            return setting.prices.op_seconds(origin)
        forward, backward = setting.prices.op_seconds(origin, chosen, setting.sizes)
        sent, returned = setting.prices.form_seconds(origin, chosen, setting.axes)
        return forward + sent, backward + returned


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
    narrow = MIXED.get(candidates.analysis.program.precision, candidates.analysis.dtype)
    dtype = str(narrow).removeprefix("torch.")
    return sum(candidates.cluster.device(rank).peak(dtype) for rank in devices)

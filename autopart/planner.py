"""Planning: which mesh, which microbatches, which strategies, which stages, and how far from the best that can be.

Candidates are all pp x dp x tp of the devices with all numbers of microbatches (see autopart.solver.search). For each one the tensor solver chooses strategies, which gives every block its seconds and bytes, and the stage solver
cuts the chain of blocks. The search takes candidates in the order of their lower bounds and stops when no other can
be faster. The winner is priced once more from the graphs that will be emitted.

Lower bound of a candidate. With W the least seconds that all ops of one microbatch take (the tensor problem's bound),
p stages and m microbatches: stage k starts when the first microbatch has passed the stages before it, works m t_k, and
the last one has to go back, so a step takes at least max_k (t_1 + ... + t_{k-1} + m t_k). Over all ways to divide W
that is smallest when these are equal, t_k = t_1 r^(k-1) with r = (m - 1) / m, which gives W / (1 - r^p).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopart.analysis import Analysis, analyze
from autopart.block_costs import BlockCosts
from autopart.cluster import Cluster
from autopart.cost.communication import bucketed_all_reduce_seconds, send_seconds
from autopart.cost.devices import Device, Link
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.annotate import parameter_bytes
from autopart.passes.blocks import crossing
from autopart.passes.graph import Value
from autopart.passes.program import Program, Role
from autopart.passes.shard import Axes, Placements, collective_counts
from autopart.plan import Plan, StagePlan
from autopart.prices import Prices, share_of
from autopart.realize import Realization, build, check_plan, read_strategies, storage_names, strategy_names
from autopart.runtime.errors import BatchError, PlanError
from autopart.runtime.placement import BROADCAST
from autopart.runtime.schedule import make_schedule
from autopart.simulate import StageTimes, simulate
from autopart.solver import stages as stage_solver
from autopart.solver.search import Considered, Degrees, Evaluation, degrees, search
from autopart.solver.stages_problem import Block as StageBlock
from autopart.solver.stages_problem import Cut, StageProblem, StageSolution, TiedGroup
from autopart.solver.tensor_problem import relative_gap
from autopart.tensor_choice import TensorChoice, choose

RECOMPUTE = {"none": (False,), "full": (True,), "auto": (False, True)}
TENSOR_AXIS = "tp"
# What a CUDA process needs besides its tensors: context, libraries' workspaces, communication buffers.
_CUDA_OVERHEAD_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Answer:
    """A solved candidate."""

    config: Degrees
    choice: TensorChoice
    boundaries: tuple[int, ...]
    cut: StageSolution


@dataclass(slots=True)
class Planner:
    """Prices candidates of one program on one cluster for a global batch."""

    analysis: Analysis
    cluster: Cluster
    batch: int
    optimizer: str
    time_limit_s: float = 60.0
    device: Device = field(init=False)
    _prices: dict[int, Prices] = field(default_factory=dict)
    _choices: dict[tuple[int, int, int, str], TensorChoice] = field(default_factory=dict)
    _crossings: list[tuple[Value, ...]] = field(default_factory=list)
    _problems: dict[Degrees, StageProblem] = field(default_factory=dict)
    _block_costs: BlockCosts = field(init=False)

    def __post_init__(self) -> None:
        # Stages are alike, so the slowest device sets the pace of all.
        self.device = min(self.cluster.devices, key=lambda device: (device.peak("float32"), device.memory_bandwidth))
        ops = [node for block in self.analysis.blocks for node in block.nodes]
        lives = crossing(ops)
        ends = [0]
        for block in self.analysis.blocks:
            ends.append(ends[-1] + len(block.nodes))
        self._crossings = [lives[end] for end in ends]
        self._block_costs = BlockCosts(self.analysis, self.device.kind)

    # -- devices and links ----------------------------------------------------------------------------------------

    def ranks(self, config: Degrees, stage: int) -> tuple[int, ...]:
        """The stage's devices, row-major over (dp, tp): tensor ranks are neighbours."""
        count = config.dp * config.tp
        return tuple(range(stage * count, (stage + 1) * count))

    def tensor_link(self, config: Degrees) -> Link:
        """The slowest link of any tensor group."""
        groups = [range(start, start + config.tp) for start in range(0, config.devices, config.tp)]
        return _slowest([self.cluster.group_link(list(group)) for group in groups])

    def data_link(self, config: Degrees) -> Link:
        """The slowest link of any group of replicas."""
        groups = [
            [rank for rank in self.ranks(config, stage) if rank % config.tp == offset]
            for stage in range(config.pp)
            for offset in range(config.tp)
        ]
        return _slowest([self.cluster.group_link(group) for group in groups])

    def stage_link(self, config: Degrees, stage: int) -> Link:
        """The slowest link between ranks of equal coordinates in a stage and the next."""
        pairs = zip(self.ranks(config, stage), self.ranks(config, stage + 1), strict=True)
        return _slowest([self.cluster.link(i, j) for i, j in pairs])

    # -- prices ---------------------------------------------------------------------------------------------------

    def prices(self, samples: int) -> Prices:
        if samples not in self._prices:
            self._prices[samples] = Prices(self.device, self.analysis.costs(self.device.kind), samples)
        return self._prices[samples]

    def samples(self, config: Degrees) -> int:
        """Samples in one microbatch on one replica."""
        return self.batch // (config.dp * config.microbatches)

    def choice(self, config: Degrees) -> TensorChoice:
        link, data_link = self.tensor_link(config), self.data_link(config)
        key = (config.tp, self.samples(config), config.dp * 1000000 + config.microbatches, f"{link}{data_link}")
        if key not in self._choices:
            self._choices[key] = choose(
                self.analysis,
                config.tp,
                self.prices(self.samples(config)),
                link,
                data_link,
                config.dp,
                config.microbatches,
            )
        return self._choices[key]

    def lower_bound(self, config: Degrees) -> float:
        """Seconds that a step takes at least: the work alone, shared perfectly."""
        prices = self.prices(self.samples(config))
        share = 1 / config.tp
        pairs = [prices.shared_seconds(node, share, share) for node in self.analysis.block_of]
        work = self.free_seconds(config) + sum(forward + backward for forward, backward in pairs)
        if config.recompute:
            work += sum(forward for forward, _ in pairs)
        return _pipeline_floor(work, config)

    def free_seconds(self, config: Degrees) -> float:
        """Seconds of one microbatch's free ops, which some stage has to compute at least once."""
        prices = self.prices(self.samples(config))
        return sum(prices.op_seconds(node)[0] for node in self.analysis.free_block)

    def evaluate(self, config: Degrees) -> Evaluation[Answer]:
        choice = self.choice(config)
        problem = self.problem(config, choice)
        cut = stage_solver.solve(problem, self.time_limit_s)
        seconds = self.step_seconds(problem, cut, config)
        if choice.solution is None:
            bound = min(cut.lower_bound_s, seconds)
        else:
            bound = min(_pipeline_floor(choice.solution.bound + self.free_seconds(config), config), seconds)
        return Evaluation(Answer(config, choice, cut.boundaries, cut), seconds, bound)

    def step_seconds(self, problem: StageProblem, cut: StageSolution, config: Degrees) -> float:
        """The simulated step of a cut."""
        ends = list(zip(cut.boundaries, cut.boundaries[1:], strict=False))
        times = [
            StageTimes(
                sum(block.forward_s for block in problem.blocks[first:last]),
                sum(block.backward_s for block in problem.blocks[first:last]),
                reduce_s=problem.step_end_seconds(first, last),
            )
            for first, last in ends
        ]
        transfers = [max(problem.cut_at(last).forward_s, problem.cut_at(last).backward_s) for _, last in ends[:-1]]
        return _simulated(config, times, transfers) + problem.tied_seconds(cut.boundaries)

    # -- the stage problem ----------------------------------------------------------------------------------------

    def problem(self, config: Degrees, choice: TensorChoice) -> StageProblem:
        """How to cut the blocks into stages, for a candidate and its strategies."""
        if config not in self._problems:
            self._problems[config] = self._problem(config, choice)
        return self._problems[config]

    def _problem(self, config: Degrees, choice: TensorChoice) -> StageProblem:
        samples = self.samples(config)
        axes: Axes = ((TENSOR_AXIS, config.tp),) if config.tp > 1 else ()
        costs = self._block_costs.costs(
            self.prices(samples),
            choice.strategies,
            {name: placements[0] for name, placements in choice.storage.items()},
            config.tp,
            self.tensor_link(config) if config.tp > 1 else None,
        )
        private, tied = self._parameters(config, choice.storage, axes)
        blocks = []
        for index, cost in enumerate(costs):
            saved, transient = cost.saved_bytes, cost.transient_bytes
            if config.recompute:
                entering = sum(self._local_bytes(value, choice, axes, samples) for value in self._crossings[index])
                saved, transient = entering, transient + saved
            state, step_end = private[index]
            blocks.append(
                StageBlock(
                    f"block {index}, {self.analysis.keys[self.analysis.blocks[index].nodes[0]]}",
                    cost.forward_s,
                    cost.backward_s + (cost.forward_s if config.recompute else 0.0),
                    state,
                    saved,
                    transient,
                    step_end,
                )
            )
        cuts = []
        link = _slowest([self.stage_link(config, stage) for stage in range(config.pp - 1)]) if config.pp > 1 else None
        for position in range(1, len(blocks)):
            values = self._crossings[position]
            sizes = {value: self._local_bytes(value, choice, axes, samples) for value in values}
            down = sum(size for value, size in sizes.items() if value.node.meta.get("differentiable"))
            total = sum(sizes.values())
            if link is None:
                cuts.append(Cut())
            else:
                cuts.append(Cut(send_seconds(total, link), send_seconds(down, link) if down else 0.0, total + down))
        in_flight = [
            config.microbatches if config.schedule == "gpipe" else min(config.microbatches, config.pp - stage)
            for stage in range(config.pp)
        ]
        overhead = _CUDA_OVERHEAD_BYTES if self.device.kind == "cuda" else 0
        return StageProblem(
            tuple(blocks),
            tuple(cuts),
            config.microbatches,
            tuple(in_flight),
            tuple(
                float(min(self.cluster.device(rank).memory_bytes for rank in self.ranks(config, stage)))
                for stage in range(config.pp)
            ),
            float(overhead),
            tuple(tied),
        )

    def _local_bytes(self, value: Value, choice: TensorChoice, axes: Axes, samples: int) -> float:
        chosen = choice.strategies.get(value.node)
        placements: Placements = tuple(item.outputs[value.index] for item in chosen) if chosen else ()
        return value_bytes(value).at(samples) * (share_of(placements, axes) if placements else 1.0)

    def _parameters(
        self, config: Degrees, storage: Mapping[str, Placements], axes: Axes
    ) -> tuple[list[tuple[float, float]], list[TiedGroup]]:
        """Per block the bytes of its own parameters and the seconds of their step end; parameters of several blocks."""
        private = [[0.0, 0.0] for _ in self.analysis.blocks]
        tied: list[TiedGroup] = []
        readers: dict[fx.Node, set[int]] = {}
        for node, index in self.analysis.block_of.items():
            for value in graphs.inputs(node):
                if value.node.op == "placeholder" and value.node.meta["role"] in (Role.PARAMETER, Role.BUFFER):
                    readers.setdefault(value.node, set()).add(index)
        for node, found in readers.items():
            size, seconds = self.parameter(config, node, storage, axes)
            if len(found) == 1:
                (index,) = found
                private[index][0] += size
                private[index][1] += seconds
            else:
                weight = size / 4
                # every stage that holds it also updates it
                reduce = bucketed_all_reduce_seconds(weight, 2, self.data_link(config)) + seconds
                tied.append(TiedGroup(node.meta["name"], tuple(sorted(found)), size, reduce))
        return [(size, seconds) for size, seconds in private], tied

    def parameter(
        self, config: Degrees, node: fx.Node, storage: Mapping[str, Placements], axes: Axes
    ) -> tuple[float, float]:
        """Bytes that one rank holds for a parameter (with gradient and optimizer state), seconds of its step end."""
        info = self.analysis.program.tensors[node.meta["name"]]
        placements = storage.get(info.name, ())
        share = share_of(placements, axes) if placements else 1.0
        amounts = parameter_bytes(info.shape, info.dtype, self.optimizer, info.trainable)
        if not info.trainable:
            return amounts.total * share, 0.0
        held = amounts.weight * share
        seconds = self.prices(self.samples(config)).optimizer_seconds(held)
        if config.dp > 1:
            seconds += bucketed_all_reduce_seconds(held, config.dp, self.data_link(config))
        if BROADCAST in placements:
            seconds += bucketed_all_reduce_seconds(held, config.tp, self.tensor_link(config))
        return amounts.total * share, seconds


@dataclass(slots=True)
class _StagePricer:
    """Seconds of nodes of a sharded graph, collectives included."""

    planner: Planner
    config: Degrees
    axes: Axes

    def seconds(self, nodes: Sequence[fx.Node]) -> tuple[float, float]:
        from autopart.cost.communication import transition as price_transition

        planner, config = self.planner, self.config
        samples = planner.samples(config)
        prices = planner.prices(samples)
        link = planner.tensor_link(config)
        parts = config.tp
        forward = backward = 0.0
        for node in nodes:
            if "transition" in node.meta:
                _, step = node.meta["transition"]
                size = value_bytes(Value(node)).at(samples)
                differentiable = bool(node.meta.get("differentiable"))
                cost = price_transition(step.source, step.target, size, parts, link, planner.device, differentiable)
                forward += cost.forward_s
                backward += cost.backward_s
            elif graphs.is_op(node):
                one, two = self._op(prices, node)
                forward += one
                backward += two
        return forward, backward

    def _op(self, prices: Prices, node: fx.Node) -> tuple[float, float]:
        origin = node.meta.get("origin")
        if origin is None:
            return 0.0, 0.0
        names = node.meta.get("strategies")
        if not names:
            return prices.shared_seconds(origin, 1.0, 1.0)
        offered = self.planner.analysis.strategies(self.config.tp)[origin]
        strategy = next(item for item in offered if item.name == names[0])
        return prices.op_seconds(origin, strategy, self.config.tp)


def _pairs(before: fx.Graph, after: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Nodes of a stage's graph and their counterparts in the sharded one, which keeps order and adds collectives."""
    kept = [node for node in after.nodes if "transition" not in node.meta and node.op == "call_function"]
    kept = [node for node in kept if graphs.is_op(node)]
    ops = [node for node in before.nodes if graphs.is_op(node)]
    return dict(zip(ops, kept, strict=True))


def _pipeline_floor(work: float, config: Degrees) -> float:
    """Least seconds of a step whose microbatches take ``work`` seconds each through all stages; see the module."""
    ratio = (config.microbatches - 1) / config.microbatches
    return work / (1 - ratio**config.pp)


def _slowest(links: Sequence[Link]) -> Link:
    return min(links, key=lambda link: (link.ring_bandwidth, -link.latency_s))


def _simulated(config: Degrees, times: Sequence[StageTimes], transfers: Sequence[float]) -> float:
    edges = {(stage, stage + 1) for stage in range(config.pp - 1)}
    schedule = make_schedule(config.schedule, config.pp, config.microbatches, edges)
    return simulate(schedule, times, lambda action: transfers[min(action.stage, action.peer or 0)]).makespan_s


def make_plan(
    program: Program,
    cluster: Cluster,
    *,
    batch: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    recompute: str = "auto",
    optimizer: str = "adamw",
    time_limit_s: float = 60.0,
    analysis: Analysis | None = None,
) -> Plan:
    """The fastest plan found, with its lower bound; what is given is forced.

    batch: samples of a step over all replicas (default: those of the example inputs). time_limit_s: for each solver
    call. Raises InfeasibleError when nothing fits in memory, BatchError when the model's batch may not be split that
    way, PlanError for contradicting limits.
    """
    start = time.perf_counter()
    analysis = analysis or analyze(program)
    batch = batch or program.batch
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if analysis.split.flaw:
        if (dp or 1) > 1 or (microbatches or 1) > 1:
            raise BatchError(
                f"the batch may not be split: {analysis.split.flaw}; use one replica and one microbatch, "
                "and pipeline or tensor parallelism instead"
            )
        dp, microbatches = 1, 1
    planner = Planner(analysis, cluster, batch, optimizer, time_limit_s)
    candidates = degrees(
        cluster.device_count,
        batch,
        pp=pp,
        dp=dp,
        tp=tp,
        microbatches=microbatches,
        schedules=(schedule or "1f1b",),
        recompute=RECOMPUTE[recompute],
        max_pp=None if pp else len(analysis.blocks),
        max_tp=None if tp else max(node.count for node in cluster.nodes),
    )
    if pp is not None and pp > len(analysis.blocks):
        raise PlanError(f"pp={pp} stages need as many blocks, {program.name} has {len(analysis.blocks)}; lower pp")
    solving = time.perf_counter()
    result = search(candidates, planner.evaluate, planner.lower_bound)
    solved = time.perf_counter()
    plan = describe(planner, result.answer)
    bound = min(result.bound, plan.step_time_s)
    return replace(
        plan,
        bound_s=bound,
        gap=relative_gap(plan.step_time_s, bound),
        solve_s=solved - solving,
        total_s=time.perf_counter() - start,
        considered=tuple(_row(item) for item in result.considered),
    )


def _row(item: Considered) -> dict[str, object]:
    return {
        "config": str(item.config),
        "status": item.status.value,
        "seconds": item.seconds,
        "reason": item.reason.splitlines()[0],
    }


def describe(planner: Planner, answer: Answer) -> Plan:
    """The plan of a solved candidate, priced from the graphs that will be emitted."""
    analysis, config, choice = planner.analysis, answer.config, answer.choice
    axes: Axes = ((TENSOR_AXIS, config.tp),) if config.tp > 1 else ()
    found = build(analysis, answer.boundaries, axes, choice.strategies, choice.storage)
    problem = planner.problem(config, choice)
    stages = []
    times = []
    samples = planner.samples(config)
    for index, graph in enumerate(found.local):
        first, last = answer.boundaries[index], answer.boundaries[index + 1]
        pairs = _pairs(found.stages[index].graph, graph)
        for node, local in pairs.items():
            local.meta["origin"] = found.stages[index].origin[node]
        forward, backward = _StagePricer(planner, config, axes).seconds(list(graph.nodes))
        if config.recompute:
            backward += forward
        ranks = planner.ranks(config, index)
        stages.append(
            StagePlan(
                devices=ranks,
                mesh=(("dp", config.dp), (TENSOR_AXIS, config.tp)),
                blocks=(first, last),
                first_op=analysis.keys[analysis.blocks[first].nodes[0]],
                last_op=analysis.keys[analysis.blocks[last - 1].nodes[-1]],
                forward_s=forward,
                backward_s=backward,
                memory_bytes=round(problem.stage_bytes(index, first, last)),
                capacity_bytes=min(planner.cluster.device(rank).memory_bytes for rank in ranks),
                parameters=_held(analysis, found, graph),
                collectives=_collectives(graph, axes, samples),
            )
        )
        times.append(StageTimes(forward, backward, reduce_s=problem.step_end_seconds(first, last)))
    transfers = [
        max(problem.cut_at(cut).forward_s, problem.cut_at(cut).backward_s) for cut in answer.boundaries[1:-1]
    ]
    program = analysis.program
    costs = analysis.costs(planner.device.kind)
    flops = sum(
        cost.flops_forward.at(planner.batch) + cost.flops_backward.at(planner.batch)
        for cost in costs.values()
        if cost.contraction
    )
    return Plan(
        fingerprint=program.fingerprint,
        model=program.name,
        cluster=str(planner.cluster),
        batch=planner.batch,
        dtype=str(analysis.dtype).removeprefix("torch."),
        schedule=config.schedule,
        microbatches=config.microbatches,
        stages=tuple(stages),
        recompute="full" if config.recompute else "none",
        strategies=strategy_names(analysis, choice.strategies),
        storage=storage_names(choice.storage),
        step_time_s=_simulated(config, times, transfers) + problem.tied_seconds(answer.boundaries),
        tokens=_tokens(program, planner.batch),
        flops=float(flops),
        notes=(*program.notes, *analysis.split.notes, *([analysis.split.flaw] if analysis.split.flaw else [])),
    )


def _held(analysis: Analysis, found: Realization, graph: fx.Graph) -> int:
    """Numbers in the parameters that one rank of a stage holds."""
    total = 0
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER:
            size = value_bytes(Value(node)).at(1) / node.meta["val"].element_size()
            total += round(size * share_of(node.meta["placements"], found.axes))
    return total


def _collectives(graph: fx.Graph, axes: Axes, samples: int) -> dict[str, dict[str, int]]:
    """Calls and bytes of one microbatch by operation, forward and backward together."""
    totals: dict[str, dict[str, int]] = {}
    for operations in collective_counts(graph, axes, samples).values():
        for operation, (calls, size) in operations.items():
            entry = totals.setdefault(operation, {"calls": 0, "bytes": 0})
            entry["calls"] += calls
            entry["bytes"] += size
    return totals


def _tokens(program: Program, batch: int) -> int:
    """Tokens of a step: elements of the first integer input with a dim besides the samples'; else samples."""
    for spec in program.inputs:
        if spec.kind == "tensor" and spec.batch_dim is not None and "int" in spec.dtype and len(spec.shape) == 2:
            return batch * next(int(size) for size in spec.shape if isinstance(size, int))
    return batch


__all__ = ["Planner", "check_plan", "make_plan", "read_strategies"]

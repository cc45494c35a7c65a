"""How long one microbatch takes in a stage: forward, and back, op by op of the graph that is emitted.

Ops run one after another, and so do the collectives of an axis. A collective that is waited for at once takes its own
time; one that is begun before other ops (:mod:`autopart.passes.ahead`), or beside which weights' gradients are computed
(:mod:`autopart.passes.beside`), what it takes longer than these, and what it waits for collectives before it. What
replicas exchange for divided parameters is begun ahead too (:mod:`autopart.data_clock`). A GPU's ops take no less than
their host takes to start them, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.candidates import Candidates
from autopart.data_clock import Computed, DataClock
from autopart.exchanges import Exchanges
from autopart.passes import graph as graphs
from autopart.passes.ahead import begun
from autopart.passes.amounts import value_bytes
from autopart.passes.beside import products_beside
from autopart.passes.graph import Value
from autopart.passes.kept import rerun
from autopart.passes.partition import StageGraph
from autopart.passes.program import Role
from autopart.prices import Chosen, share_of
from autopart.solver.degrees import Degrees
from autopart.tensor_choice import TensorChoice
from autopart.tensor_setting import Setting

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Of one microbatch. hidden_s: by kind what of collectives passes while ops are computed, uncounted; of what
    replicas exchange for parameters, by the data axis' name. arrival_s: what a step's first forward takes longer, as it
    waits for weights that replicas update in shares.
    """

    forward_s: float
    backward_s: float
    hidden_s: Mapping[str, float]
    arrival_s: float


@dataclass(slots=True)
class _Timeline:
    """Computing, and by axis the collectives on their way. now: seconds. hidden: by kind."""

    hidden: dict[str, float]
    now: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def begin(self, axis: str, seconds: float) -> float:
        """When a collective that is begun now will be through."""
        self.busy[axis] = max(self.now, self.busy.get(axis, 0.0)) + seconds
        return self.busy[axis]

    def wait(self, end: float, kind: str, seconds: float) -> None:
        """Until the end of a collective that takes so many seconds."""
        seen = max(0.0, end - self.now)
        self.now += seen
        if not math.isclose(seen, seconds):
            self.hidden[kind] = self.hidden.get(kind, 0.0) + seconds - seen


@dataclass(slots=True)
class StageClock:
    """Seconds of one stage's sharded graph, collectives and free ops included."""

    candidates: Candidates
    config: Degrees
    stage: StageGraph
    graph: fx.Graph
    choice: TensorChoice
    recompute: Collection[str]  # layers and modules in them that run again in the backward
    exchanged: Exchanges

    def seconds(self, ahead: float = 0.0) -> StageSeconds:
        """ahead: seconds of the first forward before this stage's."""
        setting, hidden = self.candidates.setting(self.config), dict[str, float]()
        priced = self._priced(setting, hidden)
        started = begun(self.graph, self.recompute) if setting.beside else {}
        behind: dict[fx.Node, list[fx.Node]] = {}  # by op what is waited for behind it
        for node, meanwhile in started.items():
            behind.setdefault(meanwhile[-1], []).append(node)
        there, seen = self._forward(priced, started, behind, hidden)
        repeated = rerun(self.graph, self.recompute)
        again = {node: seen[node] for node in repeated if node in seen}
        back = self._backward(priced, again, setting, started, behind, hidden)
        adding = math.fsum(
            self.candidates.adding_seconds(self.config, self.choice, self.stage.origin[node])
            for node in self.stage.graph.nodes
            if node.op == "placeholder" and node.meta["role"] is Role.PARAMETER
        )
        units, passing = self.exchanged.units, setting.data.passing_seconds
        there = there.longer(passing(sum(unit.gathered for unit in units), 0.0))
        summed = sum(unit.summed for unit in units) + sum(message.size for message in self.exchanged.scattered)
        back = back.longer(adding + passing(sum(unit.gathered_again for unit in units), summed))
        data = DataClock(self.exchanged, setting.data.replicas, setting.data.link, self.config.microbatches)
        forward, backward, unseen = data.passes(there, back)
        if unseen > _ROUNDING * (forward + backward):
            hidden["dp"] = unseen
        starting = self._starting_s(setting, repeated)
        return StageSeconds(max(forward, starting[0]), max(backward, starting[1]), hidden, data.arrival(there, ahead))

    def _starting_s(self, setting: Setting, again: Collection[fx.Node]) -> tuple[float, float]:
        """Seconds in which the host starts the kernels of the forward and of the backward, with what runs again."""
        host_s = self.candidates.device.host_s
        if not host_s:
            return 0.0, 0.0
        forward = backward = repeated = 0
        for node in self.graph.nodes:
            if graphs.is_op(node) and "transition" not in node.meta:
                there, back = setting.prices.kernels(node.meta["origin"])
                forward, backward = forward + there, backward + back
                repeated += there if node in again else 0
        return host_s * forward, host_s * (backward + repeated)

    def _forward(
        self,
        priced: Mapping[fx.Node, tuple[float, float]],
        started: Collection[fx.Node],
        behind: Mapping[fx.Node, list[fx.Node]],
        hidden: dict[str, float],
    ) -> tuple[Computed, dict[fx.Node, float]]:
        """The pass, and seconds of each node, what is waited for it included."""
        line, ends, seen = _Timeline(hidden), dict[fx.Node, float](), dict[fx.Node, float]()
        spans = dict[fx.Node, tuple[float, float]]()
        for node, (seconds, _) in priced.items():
            before = line.now
            axis, kind = _collective(node, forward=True)
            if not kind:
                line.compute(seconds)
            elif node in started:
                ends[node] = line.begin(axis, seconds)
            else:
                line.wait(line.begin(axis, seconds), kind, seconds)
            seen[node], spans[node] = line.now - before, (before, line.now)
            for other in behind.get(node, ()):
                before = line.now
                if other in ends:
                    line.wait(ends[other], _collective(other, forward=True)[1], priced[other][0])
                seen[other] += line.now - before
        return Computed(line.now, spans), seen

    def _backward(
        self,
        priced: Mapping[fx.Node, tuple[float, float]],
        again: Mapping[fx.Node, float],
        setting: Setting,
        started: Collection[fx.Node],
        behind: Mapping[fx.Node, list[fx.Node]],
        hidden: dict[str, float],
    ) -> Computed:
        """The pass. again: seconds of ops that run again, of which each is told right before its own backward; what is
        begun ahead does not pass beside them.
        """
        put_off: dict[fx.Node, float] = {}  # by product and by transition, weights' gradients
        for node, products in (products_beside(self.graph, self.recompute) if setting.beside else {}).items():
            for product in products:
                origin = product.meta["origin"]
                put_off[product] = setting.prices.weight_seconds(origin, self._chosen(origin), setting.sizes)
            put_off[node] = -sum(put_off[product] for product in products)
        line, ends = _Timeline(hidden), dict[fx.Node, float]()
        repeated, spans = 0.0, dict[fx.Node, tuple[float, float]]()
        for node, (_, seconds) in reversed(list(priced.items())):
            before = line.now + repeated
            repeated += again.get(node, 0.0)
            for other in behind.get(node, ()):
                axis, kind = _collective(other, forward=False)
                if kind:
                    ends[other] = line.begin(axis, priced[other][1])
            axis, kind = _collective(node, forward=False)
            if not kind:
                line.compute(seconds - put_off.get(node, 0.0))
            else:
                end = ends[node] if node in started else line.begin(axis, seconds)
                line.compute(-put_off.get(node, 0.0))
                line.wait(end, kind, seconds)
            spans[node] = before, line.now + repeated
        return Computed(line.now + repeated, spans)

    def _priced(self, setting: Setting, hidden: dict[str, float]) -> dict[fx.Node, tuple[float, float]]:
        """Seconds of each op and transition forward and back, in the order of the graph."""
        sizes = dict(self.candidates.layout.axes(self.config))
        numbers = {name: index for index, name in enumerate(sizes)}
        found = {}
        for node in self.graph.nodes:
            if "transition" in node.meta:
                axis, step = node.meta["transition"]
                gradient = bool(node.meta.get("differentiable"))
                price = setting.conversions.step(numbers[axis], step.source, step.target, gradient)
                size = value_bytes(Value(node)).at(setting.prices.batch)
                # what the other axes leave; this one's ranks have or get it whole
                others = [1 if name == axis else parts for name, parts in sizes.items()]
                found[node] = price.seconds(size * share_of(node.args[0].meta["placements"], others))
            elif graphs.is_op(node):
                found[node] = self._op(node, setting, hidden)
        return found

    def _chosen(self, origin: fx.Node) -> Chosen:
        return self.choice.strategies.get(origin, ())

    def _op(self, node: fx.Node, setting: Setting, hidden: dict[str, float]) -> tuple[float, float]:
        origin = node.meta["origin"]
        chosen = self._chosen(origin) if node.meta.get("strategies") else ()
        if not chosen:
            return setting.prices.op_seconds(origin)
        forward, backward = setting.prices.op_seconds(origin, chosen, setting.sizes)
        exchanged = setting.prices.form_seconds(origin, chosen, setting.axes, setting.beside)
        for kind, seconds in exchanged.hidden_s.items():
            hidden[kind] = hidden.get(kind, 0.0) + seconds
        return forward + exchanged.forward_s, backward + exchanged.backward_s


def _collective(node: fx.Node, forward: bool) -> tuple[str, str]:
    """The axis and the kind of a transition's collective; empty where it sends nothing."""
    if "transition" not in node.meta:
        return "", ""
    axis, step = node.meta["transition"]
    kind = step.forward if forward else step.backward if node.meta.get("differentiable") else None
    return axis, kind or ""

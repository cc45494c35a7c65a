"""What plans of one program, batch and limits tell later ones, which are for other clusters.

Prices and solved problems that do not depend on where clusters differ are shared. Where all that later clusters have
less of is memory (``less_memory``), what came of a configuration there holds here too:

- an answer that still fits is as good as any, as what fits here fitted there, and its bound holds;
- what took no less than so many seconds, or did not fit, does not now.

The last plan's configuration is tried first, wherever the next one is for: what is slower is then soon told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopart.answers import Answer
from autopart.candidate_settings import same_but_for_memory
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.runtime.errors import InfeasibleError
from autopart.solver.degrees import Degrees, UnlikeMeshes
from autopart.solver.search_space import Evaluation, NotBetter


@dataclass(slots=True)
class EarlierPlans:
    """Of plans with equal limits. ``make_plan`` takes and fills it. best: the last plan's configuration.

    less_memory: later clusters have less, so that bounds have to be of plans that divide parameters too.
    """

    less_memory: bool = False
    candidates: Candidates | None = None
    best: Degrees | UnlikeMeshes | None = None
    _came: dict[Degrees, Evaluation[Answer] | NotBetter | InfeasibleError] = field(default_factory=dict)

    def take(self, cluster: Cluster, make: Callable[[], Candidates]) -> Candidates:
        """The candidates of the next plan, which share what earlier ones know. make: the first."""
        if self.candidates is None:
            self.candidates = make()
            return self.candidates
        if not self.less_memory or not has_no_more_memory(cluster, self.candidates.cluster):
            self._came = {}
        self.candidates = self.candidates.elsewhere(cluster)
        return self.candidates

    def evaluate(self, config: Degrees, below: float) -> Evaluation[Answer]:
        """As :meth:`Candidates.evaluate`; what did not fit on more memory is short of as much at least."""
        assert self.candidates is not None
        came = self._came.get(config)
        if isinstance(came, InfeasibleError):
            raise came
        if isinstance(came, NotBetter) and came.seconds >= below:
            raise came
        if isinstance(came, Evaluation) and (held := self._held(came)) is not None:
            return held
        bound = -math.inf if came is None else came.bound
        try:
            found = self.candidates.evaluate(config, below)
            found = replace(found, bound=min(max(found.bound, bound), found.objective))
        except NotBetter as error:
            stopped = self._came[config] = NotBetter(error.seconds, max(error.bound, bound))
            raise stopped from None
        except InfeasibleError as error:
            self._came[config] = error
            raise
        self._came[config] = found
        return found

    def closest(self) -> Degrees | None:
        """Of the configurations that did not fit the one that is over its memory by the fewest bytes."""
        over = {
            config: came.excess_bytes
            for config, came in self._came.items()
            if isinstance(came, InfeasibleError) and came.excess_bytes is not None
        }
        return min(over, key=over.__getitem__, default=None)

    def _held(self, came: Evaluation[Answer]) -> Evaluation[Answer] | None:
        """An earlier answer on this cluster, where it fits."""
        assert self.candidates is not None
        answer, layout = came.answer, self.candidates.layout
        slots = tuple(
            replace(slot, capacity_bytes=float(layout.capacity(answer.config, stage)))
            for stage, slot in enumerate(answer.problem.slots)
        )
        problem = replace(answer.problem, slots=slots)
        if problem.excess_bytes(answer.way) > 0:
            return None
        bound = max(came.bound, self.candidates.work_floor(answer.config))
        return replace(came, answer=replace(answer, problem=problem, others=()), bound=min(bound, came.objective))


def has_no_more_memory(cluster: Cluster, before: Cluster) -> bool:
    """Whether clusters differ in their devices' memory alone, and no device has more than before."""
    if len(cluster.nodes) != len(before.nodes):
        return False
    return all(
        node == other
        or (
            same_but_for_memory(node.device, other.device)
            and node.device.memory_bytes <= other.device.memory_bytes
            and replace(node, device=other.device) == other
        )
        for node, other in dict.fromkeys(zip(cluster.nodes, before.nodes, strict=True))
    )

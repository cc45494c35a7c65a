"""What strategies do not count, and when they should: gradients of tied parameters that stages sum, values that they
send, and, where hosts bind, the end of a step.

Strategies are chosen by the seconds of devices before stages are known, so that nothing of this is among them, or too
little. Where it is much of a step, they are chosen once more with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass

from autopart.answers import Answer
from autopart.candidate_stages import CandidateStages
from autopart.cost.communication import send_seconds
from autopart.passes.amounts import value_bytes
from autopart.prices import share_of
from autopart.solver.degrees import Degrees
from autopart.tensor_choice import TensorChoice

MOST_OF_ENDS = 4.0
"""Times that the end of a step counts where hosts bind."""
_MUCH_LESS = 0.02
"""Of a step's seconds: by how much less it has to take for other strategies to be tried."""


@dataclass(slots=True)
class CandidatePassed(CandidateStages):
    """What of a candidate's step strategies do not count, and could save."""

    def tied_to_share(self, config: Degrees, choice: TensorChoice, step_s: float) -> dict[str, float]:
        """By parameter the seconds in which stages sum its gradient where ranks have it whole; none where dividing
        these saves little of a step.
        """
        if config.pp == 1 or not config.axes:
            return {}
        tied = {node.meta["name"]: seconds for node, _, seconds in self._tied_seconds(config, whole=True)}
        sizes = self.setting(config).sizes
        shares = {name: share_of(choice.storage[name], sizes) - 1 / config.tp for name in tied}
        saved = math.fsum(tied[name] * share for name, share in shares.items())
        return tied if saved > _MUCH_LESS * step_s else {}

    def ends_decide(self, answer: Answer, step_s: float) -> bool:
        """Whether hosts bind, so that most seconds that strategies may save in a microbatch are none, and what a step
        ends with is much of it.
        """
        config = answer.config
        if not config.axes or not self.starts_bind(config):
            return False
        return max(map(answer.problem.step_end_seconds, answer.way)) > _MUCH_LESS * step_s

    def sent_to_share(self, answer: Answer, step_s: float) -> dict[Hashable, float]:
        """By class of ops and output the seconds of a microbatch in which the stages of an answer send and receive what
        these make, if ranks have it whole; none where dividing it saves little of a step.
        """
        config, way, samples = answer.config, answer.way, self.samples(answer.config)
        found: dict[Hashable, float] = {}
        saved = [0.0] * (len(way) + 1)  # by cut, of one of the two stages that are busy with what crosses
        places = self.layout.places(config)
        for stage, step in enumerate(way[:-1] if config.axes else ()):
            if places[stage] == places[stage + 1]:  # of one rank
                continue
            link = self.layout.stage_link(config, stage, stage + 1)
            for value in self.positions.crossings[step.last]:
                size, kind = value_bytes(value).at(samples), self.analysis.classes.get(value.node)
                share = self.local_bytes(value, config, answer.choice) / size if size else 0.0
                if kind is not None and share > 1 / config.tp:
                    passes = 1 + bool(value.node.meta.get("differentiable"))
                    seconds = passes * (send_seconds(size, link) - send_seconds(0, link))
                    saved[stage + 1] += (share - 1 / config.tp) * seconds
                    found[kind, value.index] = found.get((kind, value.index), 0.0) + 2 * seconds
        most = config.microbatches * max(map(sum, itertools.pairwise(saved)))
        return found if most > _MUCH_LESS * step_s else {}

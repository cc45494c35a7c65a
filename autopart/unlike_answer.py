"""A solved configuration of unlike meshes."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.mesh_prices import Priced
from autopart.runtime.schedule import places_of
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.stages_problem import StageProblem, Way


@dataclass(frozen=True, slots=True)
class UnlikeAnswer:
    """priced: one for each shape of the problem. devices: of each stage, in the cluster."""

    config: UnlikeMeshes
    priced: tuple[Priced, ...]
    problem: StageProblem
    way: Way
    devices: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> list[Priced]:
        return [self.priced[self.problem.slots[step.slot].shape] for step in self.way]

    @property
    def places(self) -> tuple[int, ...]:
        """The rank of the pipeline that runs each stage."""
        return places_of(self.config.schedule, self.config.stages, self.config.virtual)

    @property
    def is_tight(self) -> bool:
        """Whether memory binds: some layer runs again, or replicas divide parameters."""
        return any(item.mesh.zero for item in self.stages) or any(step.choices for step in self.way)

    def held(self, stage: int) -> dict[str, int]:
        """The parameters of a stage's blocks by name, with the level of ZeRO of each."""
        item, step = self.stages[stage], self.way[stage]
        inside = set(self.problem.blocks_between(step.first, step.last))
        readers = item.parts[0].candidates.readers
        names = [node.meta["name"] for node, blocks in readers.items() if inside & set(blocks)]
        return {name: item.choice.levels.get(name, 0) for name in names}

"""The schedules of a program: its plan's own, that of a smaller batch, and that of an evaluation."""

from __future__ import annotations

from contextlib import suppress

from autopart.runtime.dry_run import dry_run
from autopart.runtime.errors import ScheduleError
from autopart.runtime.links import edges_of
from autopart.runtime.manifest import Manifest
from autopart.runtime.mesh import Mesh
from autopart.runtime.schedule import NAMES, Action, Schedule, forward_only, gpipe, make_schedule, post_receives_early
from autopart.runtime.schedule.receipts import Receipts, receipts


class PlannedSchedules:
    """planned: of a batch of the manifest's microbatches. Raises ScheduleError when it would deadlock."""

    def __init__(self, manifest: Manifest, mesh: Mesh) -> None:
        self._manifest = manifest
        self._mesh = mesh
        self.planned = self._make()
        self._receipts: dict[int, Receipts] = {}
        self._by_microbatches = {manifest.microbatches: self.planned}

    def of(self, microbatches: int) -> Schedule:
        """The plan's schedule for a batch of fewer microbatches; gpipe where the plan's own has no such form."""
        if microbatches not in self._by_microbatches:
            manifest, places = self._manifest, self._mesh.place_of
            edges, stages = edges_of(manifest), len(manifest.stages)
            found = gpipe(stages, microbatches, *edges, places)
            if manifest.loss is not None and manifest.schedule in NAMES:
                warmup = tuple(min(forwards, microbatches) for forwards in manifest.warmup)
                with suppress(ScheduleError):
                    named = make_schedule(manifest.schedule, stages, microbatches, *edges, warmup, places)
                    dry_run(named)
                    found = named
            self._by_microbatches[microbatches] = found
        return self._by_microbatches[microbatches]

    def receipts(self, microbatches: int) -> Receipts:
        """What arrivals prove to this rank under the schedule :meth:`of` so many microbatches."""
        if microbatches not in self._receipts:
            repeats = microbatches if self._manifest.delays_gradients else None
            found = receipts(self.of(microbatches), self._mesh.pipeline.index, repeats)
            self._receipts[microbatches] = found
        return self._receipts[microbatches]

    def evaluation(self, microbatches: int) -> Schedule:
        """Forwards only, of all outputs."""
        return forward_only(len(self._manifest.stages), microbatches, edges_of(self._manifest)[0], self._mesh.place_of)

    def own(self, schedule: Schedule) -> tuple[Action, ...]:
        """What this rank does under a schedule."""
        return post_receives_early(schedule.ranks[self._mesh.pipeline.index])

    def _make(self) -> Schedule:
        edges, gradient_edges = edges_of(self._manifest)
        count, microbatches = len(self._manifest.stages), self._manifest.microbatches
        if self._manifest.loss is None:
            return gpipe(count, microbatches, edges, gradient_edges, self._mesh.place_of)
        name, warmup = self._manifest.schedule, self._manifest.warmup
        schedule = make_schedule(name, count, microbatches, edges, gradient_edges, warmup, self._mesh.place_of)
        if warmup or name not in NAMES:
            dry_run(schedule)
        places = tuple(place for _, place in sorted(schedule.rank_of.items()))
        if places != self._mesh.place_of:
            raise ScheduleError(
                f"the schedule runs its stages on the ranks {list(places)} of the pipeline, the stages' devices make "
                f"that {list(self._mesh.place_of)}; write a line for each rank"
            )
        return schedule

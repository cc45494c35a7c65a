"""Meshes that a stage can have on a run of devices, their strategies, and what blocks and crossings cost there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from autopart.candidates import Candidates
from autopart.cluster import slower
from autopart.cost.communication import bucketed_all_reduce_seconds, send_seconds
from autopart.cost.devices import Link
from autopart.crossing_memory import cut_of
from autopart.device_row import DeviceRow, Pieces
from autopart.merged_shapes import in_common, merged, most_of
from autopart.parameter_prices import ParameterPrice
from autopart.passes.conversion import Axes
from autopart.passes.graph import Value
from autopart.passes.shard import value_placements
from autopart.passes.unlike_meshes import StageSetting, plain
from autopart.piece_prices import End, PiecePrices, Traffic, crosses_unlike
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.placement import Placements
from autopart.solver.degrees import Degrees, UnlikeMeshes
from autopart.solver.stages_parts import Cut, Shape
from autopart.tensor_choice import TensorChoice

INSIDE, NETWORK = 0, 1
"""Which of a shape's lists of cuts crosses at a place: inside a node, or between two."""
ALONE = Degrees(1, 1, (), 1, "1f1b")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A stage's mesh on some devices. rows: samples of a microbatch on each replica. zero: the level of ZeRO of all
    parameters that its replicas can divide.
    """

    axes: tuple[int, ...]
    pieces: Pieces
    rows: tuple[int, ...]
    zero: int = 0

    @property
    def dp(self) -> int:
        return len(self.rows)

    @property
    def tp(self) -> int:
        return math.prod(self.axes)

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def shares(self) -> tuple[int, ...]:
        """As a plan has them: empty for equal parts."""
        divisor = math.gcd(*self.rows)
        return () if len(set(self.rows)) == 1 else tuple(row // divisor for row in self.rows)

    def is_alike(self, other: Mesh) -> bool:
        """Whether every rank has what the rank of the same coordinates has."""
        return (self.rows, self.axes) == (other.rows, other.axes)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of node that each replica's devices are of."""
        ranks = [kind for kind, count in self.pieces for _ in range(count)]
        return tuple(ranks[:: self.tp])


_LIMITED_GAP = 0.01
"""How near to the fastest, strategies are sought that hold less: no bound hangs on them, and nearer takes seconds."""


@dataclass(frozen=True, slots=True)
class Part:
    """The replicas of a mesh on devices of one kind, as a candidate of their own: prices with the most rows of any."""

    candidates: Candidates
    config: Degrees

    def gradient_bytes(self, name: str, choice: TensorChoice) -> float:
        """Of a parameter's gradient, what one rank sends when it is summed."""
        candidates = self.candidates
        info, setting = candidates.analysis.program.tensors[name], candidates.setting(self.config)
        price = ParameterPrice.of(info, choice.storage, setting, candidates.optimizer)
        return price.held.gradient * candidates.summed

    @property
    def room_bytes(self) -> float:
        """What a device has for tensors."""
        return self.candidates.device.memory_bytes - self.candidates.overhead_bytes


@dataclass(frozen=True, slots=True)
class Priced:
    """A mesh with its strategies and what blocks cost there. parts: the slowest first. alone: each by itself."""

    mesh: Mesh
    parts: tuple[Part, ...]
    choice: TensorChoice
    shape: Shape
    alone: tuple[Shape, ...]

    @property
    def axes(self) -> Axes:
        return self.parts[0].candidates.layout.axes(self.parts[0].config)

    @property
    def setting(self) -> StageSetting:
        return StageSetting(self.mesh.dp, self.axes, self.choice.strategies, self.choice.storage, self.mesh.shares)

    def placements(self, value: Value) -> Placements:
        """How the stage has a value."""
        return value_placements(value, self.choice.strategies, self.axes)


@dataclass(slots=True)
class MeshPrices:
    """Meshes and prices on the devices of a cluster. dp, tp: of every stage, where they are given."""

    candidates: Candidates
    dp: int | None = None
    tp: int | None = None
    row: DeviceRow = field(init=False)
    pieces: PiecePrices = field(default_factory=PiecePrices)
    _bases: dict[int, Candidates] = field(default_factory=dict)
    _meshes: dict[tuple[Pieces, int], tuple[Mesh, ...]] = field(default_factory=dict)
    _parts: dict[tuple[Mesh, int, str, str], tuple[Part, ...]] = field(default_factory=dict)
    _choices: dict[tuple[Mesh, int, float | None], TensorChoice] = field(default_factory=dict)
    _priced: dict[tuple[object, ...], Priced] = field(default_factory=dict)
    _divisible: dict[int, bool] = field(default_factory=dict)
    _pairs: dict[tuple[object, ...], tuple[tuple[Cut, ...], ...]] = field(default_factory=dict)
    positions: tuple[int, ...] = field(init=False)  # numbers of those between which stages lie
    bucket_bytes: int = field(init=False)  # of all meshes' messages of gradients: as of replicas of the whole model
    _tied: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        candidates = self.candidates
        self.row = DeviceRow(candidates.cluster)
        self.bucket_bytes = candidates.bucket_bytes(Degrees(1, candidates.cluster.device_count, (), 1, "1f1b"))
        crossings = candidates.positions.crossings
        self.positions = tuple(number for number, values in enumerate(crossings) if all(map(crosses_unlike, values)))
        self._tied = frozenset(node.meta["name"] for node, found in candidates.readers.items() if len(found) > 1)

    def meshes(self, pieces: Pieces, rows: int, levels: Sequence[int] = (0,)) -> tuple[Mesh, ...]:
        """Every mesh on these devices for microbatches of so many samples. levels: of ZeRO where there are replicas."""
        found = self._whole_meshes(pieces, rows)
        return tuple(replace(mesh, zero=level) for mesh in found for level in (levels if mesh.dp > 1 else (0,)))

    def _whole_meshes(self, pieces: Pieces, rows: int) -> tuple[Mesh, ...]:
        key = pieces, rows
        if key not in self._meshes:
            count = sum(size for _, size in pieces)
            found = []
            for tp in range(1, count + 1):
                dp = count // tp
                if (
                    count % tp
                    or self.dp not in (None, dp)
                    or self.tp not in (None, tp)
                    or (dp > 1 and self.candidates.analysis.split.flaw)
                    or not self._divides(tp)
                    or any(size % tp for _, size in pieces)
                ):
                    continue
                mesh = Mesh((tp,) if tp > 1 else (), pieces, (1,) * dp)
                shared = self._shared(mesh.kinds, rows)
                if shared is not None:
                    found.append(replace(mesh, rows=shared))
            self._meshes[key] = tuple(found)
        return self._meshes[key]

    def _divides(self, tp: int) -> bool:
        """Whether most of the weights can be divided by so many tensor ranks."""
        if tp not in self._divisible:
            sizes = [info.shape for info in self.candidates.analysis.program.parameters]
            held = sum(math.prod(shape) for shape in sizes if any(size % tp == 0 for size in shape))
            self._divisible[tp] = 2 * held >= sum(map(math.prod, sizes))
        return self._divisible[tp]

    def _shared(self, kinds: Sequence[int], rows: int) -> tuple[int, ...] | None:
        """Whole rows of a microbatch for each replica, so that the slowest is done first; None if one had too few."""
        seconds = {kind: self._kind_work(kind, max(1, rows // len(kinds))) for kind in set(kinds)}
        given = dealt([seconds[kind] for kind in kinds], rows)
        return given if min(given) >= self.candidates.least_samples else None

    # -- prices on some devices -----------------------------------------------------------------------------------

    def _base(self, kind: int) -> Candidates:
        if kind not in self._bases:
            candidates, device = self.candidates, self.row.kinds[kind].device
            other = next((base for base in self._bases.values() if base.device == device), candidates)
            self._bases[kind] = other.on(candidates.cluster, device, candidates.batch, self._tied)
        return self._bases[kind]

    def parts(self, mesh: Mesh, config: UnlikeMeshes) -> tuple[Part, ...]:
        key = mesh, config.microbatches, config.schedule, config.recompute
        if key not in self._parts:
            rest = config.microbatches, config.schedule, config.recompute, config.virtual
            degrees = Degrees(1, mesh.dp, mesh.axes, *rest)
            cluster = self.row.part(mesh.pieces)
            found = []
            for kind in dict.fromkeys(mesh.kinds):
                most = max(rows for rows, own in zip(mesh.rows, mesh.kinds, strict=True) if own == kind)
                base = self._base(kind)
                view = base.on(cluster, base.device, most * mesh.dp * config.microbatches, self._tied)
                view.zero, view.bucket = mesh.zero, self.bucket_bytes
                found.append((self._kind_work(kind, most), Part(view, degrees)))
            found.sort(key=lambda item: -item[0])
            self._parts[key] = tuple(part for _, part in found)
        return self._parts[key]

    def priced(self, mesh: Mesh, config: UnlikeMeshes, memory_limit: float | None = None) -> Priced:
        """memory_limit: for the strategies, see Candidates.choose. Raises InfeasibleError where none hold so little."""
        key = mesh, config.microbatches, config.schedule, config.recompute, config.virtual, memory_limit
        if key not in self._priced:
            self._priced[key] = self._price(mesh, config, memory_limit)
        return self._priced[key]

    def _price(self, mesh: Mesh, config: UnlikeMeshes, memory_limit: float | None) -> Priced:
        parts = self.parts(mesh, config)
        key = mesh, config.microbatches, memory_limit
        if key not in self._choices:
            gap = _LIMITED_GAP if memory_limit is not None else 0.0
            self._choices[key] = parts[0].candidates.choose(parts[0].config, memory_limit, gap=gap)
        choice = self._choices[key]
        own = in_common([part.candidates.problem(part.config, choice).shapes[0] for part in parts])
        least = min(part.room_bytes for part in parts)
        factors = [least / part.room_bytes if least > 0 else 1.0 for part in parts]
        shape = merged(own, factors)
        # with another stage, over the slowest link; UnlikeCandidates.tied_seconds counts what there is
        link = self._tied_link()
        tied = tuple(
            replace(
                group,
                seconds=bucketed_all_reduce_seconds(parts[0].gradient_bytes(group.name, choice), 2, link),
            )
            for group in shape.tied
        )
        links = self.between(mesh, mesh, INSIDE), self.between(mesh, mesh, NETWORK)
        each = [
            tuple(tuple(self._cut(part, choice, position, link) for position in self.positions) for link in links)
            for part in parts
        ]
        cuts = tuple(
            tuple(most_of(ends, factors) for ends in zip(*of_link, strict=True)) for of_link in zip(*each, strict=True)
        )
        made = replace(shape, cuts=cuts, tied=tied, name=self.name(mesh))
        alone = tuple(replace(one, cuts=its, tied=tied) for one, its in zip(own, each, strict=True))
        return Priced(mesh, parts, choice, made, alone)

    def name(self, mesh: Mesh) -> str:
        counts: dict[str, int] = {}
        for kind, count in mesh.pieces:
            name = self.row.kinds[kind].device.name
            counts[name] = counts.get(name, 0) + count
        zero = f" zero={mesh.zero}" if mesh.zero else ""
        return f"dp={mesh.dp} tp={mesh.tp}{zero} on {' + '.join(f'{count}x{name}' for name, count in counts.items())}"

    def _cut(self, part: Part, choice: TensorChoice, position: int, link: Link) -> Cut:
        values = self.candidates.positions.crossings[position]
        if not values:
            return Cut()
        sizes = {value: part.candidates.local_bytes(value, part.config, choice) for value in values}
        held = part.candidates.across(part.config, choice).held[position]
        return cut_of(sizes, link, part.config.microbatches, held)

    def between(self, first: Mesh, second: Mesh, level: int) -> Link:
        """The slowest link between two stages that meet inside a node or between nodes."""
        nodes = {kind for mesh in (first, second) for kind, _ in mesh.pieces}
        spans = max(len(first.pieces), len(second.pieces)) > 1 or len(nodes) > 1
        found = [self.row.kinds[kind] for kind in sorted(nodes)]
        if level == INSIDE and not spans:
            return found[0].inside.among(2)
        shares = [node.network_among(max(first.size, second.size)) for node in found]
        return reduce(slower, shares)

    def _tied_link(self) -> Link:
        """The slowest that a group of ranks of several stages may cross."""
        cluster = self.candidates.cluster
        return cluster.group_link(range(cluster.device_count))

    def pair(self, before: Priced, after: Priced) -> tuple[tuple[Cut, ...], ...]:
        """What crosses between two unlike meshes: partial sums are added up, then the pieces are sent."""
        # the strategies of a mesh are found once, and kept; without tensor axes there are none
        key = tuple((replace(item.mesh, zero=0), id(item.choice) if item.axes else 0) for item in (before, after))
        if key not in self._pairs:
            self._pairs[key] = self._pair(before, after)
        return self._pairs[key]

    def _pair(self, before: Priced, after: Priced) -> tuple[tuple[Cut, ...], ...]:
        crossed: dict[Value, tuple[Traffic, Traffic, float, float]] = {}
        known: dict[tuple[int, ...], float] = {}  # of what values send together, which equal ones do alike

        def most_bytes(traffics: Sequence[Traffic]) -> float:
            key = tuple(map(id, traffics))
            if key not in known:
                known[key] = _most_bytes(traffics)
            return known[key]

        rows: list[tuple[float, float, float, float]] = []
        for position in self.positions:
            values = self.candidates.positions.crossings[position]
            for value in values:
                if value not in crossed:
                    crossed[value] = self._crossed(value, before, after)
            found = [crossed[value] for value in values]
            sent, returned = most_bytes([there for there, *_ in found]), most_bytes([back for _, back, *_ in found])
            forward, backward = math.fsum(item[2] for item in found), math.fsum(item[3] for item in found)
            rows.append((sent, returned, forward, backward))
        links = [self.between(before.mesh, after.mesh, level) for level in (INSIDE, NETWORK)]
        return tuple(
            tuple(
                Cut(forward + _seconds(there, link), backward + _seconds(back, link))
                for there, back, forward, backward in rows
            )
            for link in links
        )

    def _crossed(self, value: Value, before: Priced, after: Priced) -> tuple[Traffic, Traffic, float, float]:
        """What one value sends, there and back, and seconds of adding it up where it is a partial sum."""
        ends = _end(before.mesh, 0), _end(after.mesh, before.mesh.dp * before.mesh.tp)
        made, wanted = before.placements(value), after.placements(value)
        there, back = self.pieces.traffic(value, *ends, made, wanted)
        whole = plain(made)
        if whole == made:
            return there, back, 0.0, 0.0
        candidates, config = before.parts[0].candidates, before.parts[0].config
        setting = candidates.setting(config)
        size = candidates.whole_bytes(value, setting.prices.batch)
        differentiable = bool(value.node.meta.get("differentiable"))
        return there, back, *setting.conversions.seconds(made, whole, size, differentiable)

    def limited(self, mesh: Mesh, config: UnlikeMeshes, limit_bytes: float) -> Priced:
        found = self.priced(mesh, config)
        if not limit_bytes or found.choice.solution is None:
            return found
        try:
            return self.priced(mesh, config, found.choice.memory_bytes - limit_bytes)
        except InfeasibleError:
            return found

    def view(self, kind: int, rows: int) -> Candidates:
        """The whole model on one device of a kind, with so many samples."""
        base = self._base(kind)
        return base.on(base.cluster, base.device, rows, self._tied)

    def _kind_work(self, kind: int, rows: int) -> float:
        """Seconds of the whole model's ops for so many samples on one device of a kind."""
        return self.view(kind, rows).work_seconds(ALONE)


def dealt(seconds: Sequence[float], rows: int) -> tuple[int, ...]:
    """How many of the rows each gets, that takes so many seconds for one, where each row goes to who is done first.

    What all are surely given is given at once: in the time in which they do fewer rows together, less one of each.
    """
    given = [0] * len(seconds)
    if min(seconds) > 0:
        time = max(0, rows - len(given)) / sum(1 / own for own in seconds)
        given = [max(0, int(time / own) - 1) for own in seconds]
    for _ in range(rows - sum(given)):
        first = min(range(len(given)), key=lambda index: ((given[index] + 1) * seconds[index], index))
        given[first] += 1
    return tuple(given)


def have_same_strategies(first: Sequence[Priced], second: Sequence[Priced]) -> bool:
    """Whether no mesh has other strategies, as where none hold less: what did not fit does not fit again."""
    return all(one.choice is other.choice for one, other in zip(first, second, strict=True))


def _end(mesh: Mesh, first: int) -> End:
    return End(tuple(range(first, first + mesh.dp * mesh.tp)), mesh.rows, mesh.axes)


def _most_bytes(traffics: Sequence[Traffic]) -> float:
    """Of the rank that sends or receives the most."""
    sent: dict[int, float] = {}
    received: dict[int, float] = {}
    for traffic in traffics:
        for (source, target), size in traffic.items():
            sent[source] = sent.get(source, 0.0) + size
            received[target] = received.get(target, 0.0) + size
    return max((*sent.values(), *received.values()), default=0.0)


def _seconds(num_bytes: float, link: Link) -> float:
    """Of one rank's messages, which go together."""
    return send_seconds(num_bytes, link) if num_bytes else 0.0

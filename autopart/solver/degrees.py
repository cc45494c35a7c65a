"""Configurations: which degrees of parallelism, how many microbatches, which schedule; :func:`degrees` lists them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopart.report.units import counted
from autopart.runtime.errors import PlanError, UndividedBatchError
from autopart.tensor_scheme import TensorScheme

_RECOMPUTE = {"full": " recompute", "none": " no-recompute", "auto": ""}
MOST_AXES = 3
"""Tensor axes of a mesh: the 3-D scheme needs three."""
MOST_MICROBATCHES = 2**20
"""Of a step: no more of a schedule would fit into memory."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """A configuration: pp ranks of the pipeline x dp replicas x tensor axes, and how a step runs on it.

    axes: sizes of the tensor axes, outermost first; a stage's devices are row-major over (dp, *axes), so that the last
    axis joins neighbours. microbatches: per replica and step. schedule: a schedule's name. recompute: layers whose
    activations are computed again in the backward: "none", "full" (all), "auto" (chosen). virtual: stages that each
    rank of the pipeline runs.
    """

    pp: int
    dp: int
    axes: tuple[int, ...]
    microbatches: int
    schedule: str
    recompute: str = "auto"
    virtual: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "microbatches", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if len(self.axes) > MOST_AXES or any(size < 2 for size in self.axes):
            raise ValueError(f"at most {MOST_AXES} tensor axes of at least 2 devices each, not {self.axes}")
        if not self.schedule:
            raise ValueError("a configuration names its schedule")

    @property
    def tp(self) -> int:
        """Devices that share one replica of a stage."""
        return math.prod(self.axes)

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def runs(self) -> bool:
        """Whether the schedule takes as many microbatches."""
        if self.schedule == "interleaved":
            return self.microbatches % self.pp == 0
        return self.schedule != "2bw" or self.microbatches >= self.pp

    def __str__(self) -> str:
        virtual = f" x{self.virtual}" if self.virtual > 1 else ""
        recompute = _RECOMPUTE[self.recompute]
        tp = axes_text(self.axes)
        return f"pp={self.pp} dp={self.dp} tp={tp} microbatches={self.microbatches} {self.schedule}{virtual}{recompute}"


@dataclass(frozen=True, slots=True)
class UnlikeMeshes:
    """A configuration whose ``pp`` ranks of the pipeline have meshes of their own, which are chosen; see Degrees."""

    pp: int
    microbatches: int
    schedule: str
    recompute: str = "auto"
    virtual: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.microbatches, self.virtual) < 1:
            raise ValueError(
                f"ranks, microbatches and stages on a rank are at least 1: {self.pp}, {self.microbatches}, "
                f"{self.virtual}"
            )

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    @property
    def equal(self) -> Degrees:
        """The same with one device for each rank of the pipeline."""
        return Degrees(self.pp, 1, (), self.microbatches, self.schedule, self.recompute, self.virtual)

    def __str__(self) -> str:
        recompute = _RECOMPUTE[self.recompute]
        virtual = f" x{self.virtual}" if self.virtual > 1 else ""
        return f"pp={self.pp} meshes=unlike microbatches={self.microbatches} {self.schedule}{virtual}{recompute}"


Config = Degrees | UnlikeMeshes


def axes_text(axes: Sequence[int]) -> str:
    """``2x4`` for two axes, ``8`` for one, ``1`` for none."""
    return "x".join(map(str, axes)) or "1"


def read_axes(tp: int | Sequence[int] | str) -> int | tuple[int, ...]:
    """A tensor degree as users write it: a number, whose axes are free, or sizes (``"2x4"``, ``(2, 4)``).

    Raises PlanError for anything else.
    """
    if isinstance(tp, int):
        sizes: tuple[int, ...] = (tp,)
    elif isinstance(tp, str):
        parts = tp.split("x")
        if not all(part.isdecimal() for part in parts):
            raise PlanError(f"tp={tp!r} is neither a number of devices nor sizes of axes such as 2x4")
        sizes = tuple(map(int, parts))
    else:
        try:
            sizes = tuple(tp)
        except TypeError:  # a float, say
            sizes = ()
        if not sizes or not all(isinstance(size, int) for size in sizes):
            raise PlanError(f"tp is a number of devices, or sizes of axes such as (2, 4), not {tp!r}")
    if min(sizes, default=0) < 1 or (len(sizes) > 1 and min(sizes) < 2):
        raise PlanError(f"tp is at least 1, and each of several tensor axes at least 2, not {axes_text(sizes)}")
    if len(sizes) > MOST_AXES:
        raise PlanError(f"tp={axes_text(sizes)}: there are at most {MOST_AXES} tensor axes")
    return sizes[0] if len(sizes) == 1 else sizes


def degrees(
    devices: int,
    batch: int,
    *,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | Sequence[int] | str | None = None,
    microbatches: int | None = None,
    schedules: Sequence[tuple[str, int]] = (("1f1b", 1),),
    recompute: str = "auto",
    max_pp: int | None = None,
    max_tp: int | None = None,
    max_axes: int = 1,
    scheme: TensorScheme = TensorScheme.AUTO,
) -> tuple[Degrees, ...]:
    """Every configuration of exactly ``devices`` devices whose microbatches divide a batch of ``batch`` samples.

    schedules: names with the stages on each rank. max_pp: stages in all. pp, dp, tp, microbatches: forced where given;
    tp as :func:`read_axes` takes it. max_axes: tensor axes that a tensor degree is factored
    into where neither its axes nor a scheme are given. Raises PlanError, saying what would do, when nothing matches;
    UndividedBatchError where only the batch is in the way.
    """
    wanted = None if tp is None else read_axes(tp)
    axes = wanted if isinstance(wanted, tuple) else None
    count = math.prod(wanted) if isinstance(wanted, tuple) else wanted
    for name, value in (("devices", devices), ("batch", batch), ("pp", pp), ("dp", dp)):
        if value is not None and value < 1:
            raise PlanError(f"{name} is at least 1, not {value}")
    if microbatches is not None and microbatches < 1:
        raise PlanError(f"microbatches is at least 1, not {microbatches}")
    if not schedules:
        raise PlanError("name at least one schedule")
    meshes = [
        mesh
        for mesh in _meshes(devices)
        if all(want in (None, have) for want, have in zip((pp, dp, count), mesh, strict=True))
        and (max_pp is None or mesh[0] <= max_pp)
        and (max_tp is None or mesh[2] <= max_tp)
    ]
    fitting = [mesh for mesh in meshes if (scheme.fits(axes) if axes else _axes_of(mesh[2], scheme, max_axes))]
    if meshes and not fitting:
        raise PlanError(_no_scheme(scheme, devices, axes or sorted({mesh[2] for mesh in meshes})))
    meshes = fitting
    if not meshes:
        raise PlanError(_no_mesh(devices, {"pp": pp, "dp": dp, "tp": count}, {"pp": max_pp, "tp": max_tp}))
    made = [
        Degrees(pp, dp, sizes, pieces, schedule, recompute, virtual)
        for pp, dp, tensor in meshes
        if batch % dp == 0
        for sizes in ([axes] if axes else _axes_of(tensor, scheme, max_axes))
        for pieces in microbatch_counts(batch // dp)
        if microbatches in (None, pieces)
        for schedule, virtual in schedules
    ]
    if not made:
        raise UndividedBatchError(_no_batch(batch, sorted({mesh[1] for mesh in meshes}), microbatches))
    result = tuple(config for config in made if config.runs and (max_pp is None or config.stages <= max_pp))
    if not result:
        raise PlanError(_no_schedule(made, max_pp))
    return result


def factorizations(tensor: int, most: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write a tensor degree as at most ``most`` ordered axes, fewest axes first; one way, (), for 1.

    The order decides which link an axis lies on.
    """
    if tensor == 1:
        return ((),)
    found: list[tuple[int, ...]] = [(tensor,)]
    if most > 1:
        for outer in _divisors(tensor)[1:-1]:
            found += [(outer, *inner) for inner in factorizations(tensor // outer, most - 1)]
    return tuple(sorted(found, key=lambda sizes: (len(sizes), sizes)))


def microbatch_counts(samples: int) -> list[int]:
    """Into how many microbatches of equal size so many samples of a replica can be cut, the fewest first."""
    return [count for count in _divisors(samples) if count <= MOST_MICROBATCHES]


def _axes_of(tensor: int, scheme: TensorScheme, most: int) -> tuple[tuple[int, ...], ...]:
    found = factorizations(tensor, most if scheme is TensorScheme.AUTO else MOST_AXES)
    return tuple(axes for axes in found if scheme.fits(axes))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _meshes(devices: int) -> Iterator[tuple[int, int, int]]:
    """Every (pp, dp, tp) whose product is ``devices``."""
    for pp in _divisors(devices):
        for tp in _divisors(devices // pp):
            yield pp, devices // pp // tp, tp


def _no_mesh(devices: int, forced: dict[str, int | None], largest: dict[str, int | None]) -> str:
    wanted = [f"{name}={value}" for name, value in forced.items() if value is not None]
    product = math.prod(value or 1 for value in forced.values())
    if devices % product:
        below, above = devices // product * product, -(-devices // product) * product
        counts = " or ".join(str(count) for count in (below, above) if count)
        return f"{' x '.join(wanted)} does not divide {counted(devices, 'device')}; {counts} devices would do"
    wanted += [f"{name} at most {value}" for name, value in largest.items() if value is not None]
    return (
        f"no pp x dp x tp makes {devices} devices with {', '.join(wanted)}; pp, dp and tp have to be divisors of "
        f"{devices} ({', '.join(map(str, _divisors(devices)))}) whose product it is"
    )


def _no_scheme(scheme: TensorScheme, devices: int, wanted: Sequence[int]) -> str:
    given = "x".join(map(str, wanted)) if isinstance(wanted, tuple) else " or ".join(map(str, wanted))
    would = [tp for tp in _divisors(devices) if _axes_of(tp, scheme, MOST_AXES)]
    which = f"of the divisors of {devices} devices "
    if not would:
        would, which = [tp for tp in range(2, 33) if _axes_of(tp, scheme, MOST_AXES)], "with other numbers of devices "
    return (
        f"the tensor scheme {scheme.value} lays the tensor devices of a stage on {scheme.shape} axes, which tp={given} "
        f"cannot be; tensor degrees that can: {which}{', '.join(map(str, would))}"
    )


def _no_schedule(made: Sequence[Degrees], most: int | None) -> str:
    """made: configurations whose schedules take other numbers of microbatches, or with more than ``most`` stages."""
    running = [config for config in made if config.runs]
    if running:
        least = min(running, key=lambda config: config.stages)
        return (
            f"{least.schedule} makes {least.stages} stages of pp={least.pp}, and the model can be cut into {most} at "
            f"most; give a smaller pp, or a schedule with one stage on each rank, such as 1f1b"
        )
    near = max(made, key=lambda config: config.microbatches)
    takes = "a multiple of pp" if near.schedule == "interleaved" else "at least pp"
    counts = sorted({config.microbatches for config in made})
    return (
        f"the schedule {near.schedule} takes {takes}={near.pp} microbatches, not {' or '.join(map(str, counts))}; give "
        f"another number of microbatches, batch or pp, or another schedule"
    )


def _no_batch(batch: int, replicas: Sequence[int], microbatches: int | None) -> str:
    units = sorted(dp * (microbatches or 1) for dp in replicas)
    sizes = sorted({size for unit in units for size in (batch // unit * unit, -(-batch // unit) * unit) if size})
    nearest = sorted(sizes, key=lambda size: (abs(size - batch), size))[:4]
    parts = f"dp={' or '.join(map(str, replicas))}" + (f" with microbatches={microbatches}" if microbatches else "")
    return (
        f"a batch of {batch} does not divide by {parts}; batch sizes that would do: "
        f"{', '.join(map(str, sorted(nearest)))} (multiples of {' or '.join(map(str, units))})"
    )

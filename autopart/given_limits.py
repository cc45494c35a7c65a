"""What ``make_plan`` is given: checked for its types, where an error says what was expected, and read as Limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from autopart.analysis import Analysis
from autopart.cluster import Cluster
from autopart.passes.data_axis import LEVELS
from autopart.passes.program import Program
from autopart.passes.rules import RuleBook
from autopart.pins import Pins, check_stages, read_pins
from autopart.plan_checks import DROPOUT, check_warmup
from autopart.recomputation import RECOMPUTE
from autopart.runtime.errors import BatchError, ClusterError, PlanError
from autopart.runtime.schedule import NAMES
from autopart.solver.degrees import MOST_MICROBATCHES, read_axes
from autopart.tensor_scheme import TensorScheme

MOST_SAMPLES = 2**31
"""Of a batch: its divisors are looked for one by one."""
_MOST = {"batch": (MOST_SAMPLES, " samples"), "microbatches": (MOST_MICROBATCHES, "")}
MESHES = ("auto", "equal", "unlike")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan is held to, as :func:`read_limits` reads what ``make_plan`` is given; None where it is chosen.

    batch: samples of a step over all replicas. tp: a number of devices, or sizes of axes, outermost first. schedules:
    the names that are tried, each with the stages on a rank. pins: as blocks.
    """

    batch: int
    pp: int | None
    dp: int | None
    tp: int | tuple[int, ...] | None
    microbatches: int | None
    schedules: tuple[tuple[str, int], ...]
    warmup: int | tuple[int, ...] | None
    scheme: TensorScheme
    recompute: str
    zero: int | None
    meshes: str
    bucket_bytes: int | None
    pins: Pins

    @property
    def free_axes(self) -> bool:
        """Whether tensor axes are chosen, their number too."""
        return self.scheme is TensorScheme.AUTO and self.tp is None


def read_limits(
    analysis: Analysis,
    *,
    batch: int | None,
    pp: int | None,
    dp: int | None,
    tp: int | Sequence[int] | str | None,
    microbatches: int | None,
    schedule: str | None,
    virtual: int | None,
    warmup: int | Sequence[int] | None,
    tensor_scheme: TensorScheme | str,
    recompute: str,
    zero: int | None,
    meshes: str,
    bucket_bytes: int | None,
    together: Sequence[Sequence[str]] | None,
    pins: Mapping[str, int] | None,
) -> Limits:
    """Raises PlanError where limits are of no such kind or contradict each other, BatchError where the batch may not
    be split as they say.
    """
    _check_name("recompute", recompute, RECOMPUTE)
    _check_name("meshes", meshes, MESHES)
    if zero is not None and not (is_whole(zero) and zero in LEVELS):
        raise PlanError(f"zero is one of {', '.join(map(str, LEVELS))} or None (chosen), not {zero!r}")
    if zero and schedule == "2bw":
        raise PlanError("the schedule 2bw keeps two versions of whole weights; leave zero out, or use 2bw-flush")
    if not analysis.blocks:
        raise PlanError(
            f"{analysis.program.name} computes nothing that depends on a parameter, so there is nothing to divide; "
            "plan a model whose forward uses its parameters"
        )
    if analysis.split.flaw:
        if (dp or 1) > 1 or (microbatches or 1) > 1:
            raise BatchError(
                f"the batch may not be split: {analysis.split.flaw}; use one replica and one microbatch, "
                "and pipeline or tensor parallelism instead"
            )
        dp, microbatches = 1, 1
    schedules = _schedules(analysis.program, schedule, virtual)
    tried = schedules[0][0] if len(schedules) == 1 else "auto"
    if isinstance(warmup, int):
        check_warmup(tried, (warmup,), 1)
    elif warmup is not None:
        warmup = tuple(warmup)
        pp = pp or max(1, len(warmup))
        check_warmup(tried, warmup, pp)
    pinned = read_pins(analysis, together or (), pins)
    check_stages(analysis, pp, pinned, together, pins)
    return Limits(
        batch=batch or analysis.program.batch,
        pp=pp,
        dp=dp,
        tp=None if tp is None else read_axes(tp),
        microbatches=microbatches,
        schedules=schedules,
        warmup=warmup,
        scheme=_scheme(tensor_scheme),
        recompute=recompute,
        zero=zero,
        meshes=meshes,
        bucket_bytes=bucket_bytes,
        pins=pinned,
    )


def check_given(program: object, cluster: object, rules: object) -> None:
    """Raises PlanError, ClusterError where they are something else than their names say."""
    if not isinstance(program, Program):
        raise PlanError(f"make_plan takes a Program, such as autopart.capture(model, args), not a {_kind(program)}")
    if not isinstance(cluster, Cluster):
        raise ClusterError(f"make_plan takes a Cluster, such as Cluster.parse('8xH100'), not {cluster!r}")
    if not isinstance(rules, RuleBook):
        raise PlanError(f"rules is a RuleBook, such as RULES.extended({{...}}), not a {_kind(rules)}")


def check_counts(counts: Mapping[str, object]) -> None:
    """Raises PlanError where one is given that is no whole number of at least 1, or one out of proportion."""
    for name, count in counts.items():
        if count is not None and not (is_whole(count) and count >= 1):
            raise PlanError(f"{name} is a whole number of at least 1, not {count!r}")
    for name, (most, of) in _MOST.items():
        count = counts.get(name)
        if is_whole(count) and count > most:
            raise PlanError(f"{name} is at most {most:,}{of}, not {count:,}")


def check_seconds(time_limit_s: object, below: object) -> None:
    """Raises PlanError where they are no seconds."""
    for name, value in (("time_limit_s", time_limit_s), ("below", below)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise PlanError(f"{name} is a number of seconds above 0, not {value!r}")


def check_warmups(warmup: object) -> None:
    """Raises PlanError where it is neither forwards nor a list of them."""
    given = warmup if isinstance(warmup, tuple | list) else (warmup,)
    if warmup is not None and not all(map(is_whole, given)):
        raise PlanError(f"warmup is a number of forwards, or one for each stage such as (2, 1, 0), not {warmup!r}")
    if is_whole(warmup) and warmup < 1:
        raise PlanError(
            f"warmup is at least 1 forward that each stage runs ahead of the next, not {warmup}, which would leave one "
            "microbatch in the whole pipeline; leave it out to have it chosen, or give the forwards of each stage"
        )


def check_dropout(dropout: str) -> None:
    """Raises PlanError where there is no such kind of dropout."""
    _check_name("dropout", dropout, DROPOUT)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    return type(value).__name__


def _check_name(limit: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        raise PlanError(f"{limit} is one of {', '.join(names)}, not {value!r}")


def _scheme(wanted: TensorScheme | str) -> TensorScheme:
    try:
        return TensorScheme(wanted)
    except ValueError:
        names = ", ".join(scheme.value for scheme in TensorScheme)
        raise PlanError(f"tensor_scheme is one of {names}, not {wanted!r}") from None


def _schedules(program: Program, wanted: str | None, virtual: int | None) -> tuple[tuple[str, int], ...]:
    """What is tried, with the stages on each rank; 1F1B by default.

    A loss that the script computes is known only after all forwards. Raises PlanError.
    """
    if wanted not in (None, "auto", *NAMES):
        raise PlanError(f"schedule is one of {', '.join(NAMES)} or auto, not {wanted!r}")
    if program.loss is None:
        if wanted not in (None, "gpipe", "auto"):
            raise PlanError(
                f"{program.name} returns no loss, so that backwards start after all forwards: only the schedule gpipe "
                f"runs it, not {wanted}; pass loss_fn, or leave schedule out"
            )
        return (("gpipe", 1),)
    if virtual is not None and wanted not in ("interleaved", "auto") and not (wanted == "zb-v" and virtual == 2):
        raise PlanError(f"virtual: {virtual} stages on each rank are for interleaved, not {wanted or '1f1b'}")
    if wanted == "auto":
        return ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2), ("interleaved", virtual or 2)
    name = wanted or "1f1b"
    return ((name, {"interleaved": virtual or 2, "zb-v": 2}.get(name, 1)),)

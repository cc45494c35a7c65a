"""Schedules by name, where their stages lie, and how many microbatches they hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule import interleaving
from autopart.runtime.schedule.actions import Edges, Schedule
from autopart.runtime.schedule.double_buffered import two_buffered_weights
from autopart.runtime.schedule.flushing import deeper_warmup, forward_only, gpipe, one_f_one_b
from autopart.runtime.schedule.zero_bubble import v_shaped, zb_h1, zb_v

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "2bw", "2bw-flush")
SPLIT_SCHEDULES = ("zb-h1", "zb-v")
"""Those that put weights' gradients off to fill bubbles."""
# Those that run several stages on each rank.
VIRTUAL = ("interleaved", "zb-v")


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    edges: Edges,
    gradient_edges: Edges | None = None,
    warmup: Sequence[int] = (),
    places: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of that name (one of NAMES or "forward_only"), or of that text. Raises ScheduleError.

    edges, gradient_edges: as in :func:`with_exchanges`. warmup: of 1F1B, see :func:`one_f_one_b`; empty: the least.
    places: the rank of each stage, see :func:`places_of`; None: each has its own, and in the V of "zb-v".
    """
    if warmup and name != "1f1b":
        raise ScheduleError(f"only 1f1b has a warm-up, not {name}; leave warmup out")
    if name == "gpipe":
        return gpipe(stages, microbatches, edges, gradient_edges, places)
    if name == "forward_only":
        return forward_only(stages, microbatches, edges, places)
    if name == "interleaved":
        return interleaving.interleaved(stages, microbatches, edges, gradient_edges, places)
    if name == "zb-v":
        return zb_v(stages, microbatches, edges, gradient_edges, places)
    if name in NAMES:
        if places is not None and len(set(places)) != stages:
            raise ScheduleError(
                f"{name} runs one stage on each rank, not {list(places)}; {' and '.join(VIRTUAL)} run several"
            )
        if name in ("1f1b", "2bw-flush"):  # PipeDream-Flush of the 2BW paper is 1F1B
            return one_f_one_b(stages, microbatches, edges, warmup or None, gradient_edges)
        if name == "2bw":
            return two_buffered_weights(stages, microbatches, edges, gradient_edges)
        return zb_h1(stages, microbatches, edges, gradient_edges)
    if "." not in name:
        raise ScheduleError(f"no schedule is called {name!r}; there are {', '.join(NAMES)} and forward_only")
    return Schedule.parse(name)


@functools.lru_cache(maxsize=256)
def places_of(name: str, stages: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage under a schedule that runs ``virtual`` stages on each (of "zb-v" always two).

    Raises ScheduleError.
    """
    if name == "zb-v":
        return v_shaped(stages)
    return interleaving.looped(stages, stages // virtual if stages % virtual == 0 else 0)


def in_flight(
    name: str, stages: int, microbatches: int, warmup: Sequence[int] = (), places: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Most microbatches that each stage holds at once: from a forward to its backward or, where that is split, its W.

    GPipe m; 1F1B (2BW-flush) and 2BW min(m, warm-up + 1); interleaved see :func:`interleaving.in_flight`; ZB-H1
    min(m, p); ZB-V of S stages min(m, S - s).
    """
    if name == "gpipe":
        return (microbatches,) * stages
    if name == "interleaved":
        ranks = stages if places is None else len(set(places))
        return interleaving.in_flight(stages, ranks, microbatches)
    if name == "zb-h1":
        return (min(microbatches, stages),) * stages
    return tuple(min(microbatches, count + 1) for count in warmup or deeper_warmup(stages, 1))

"""Interleaved 1F1B: several stages on each rank, stage s on rank s mod p (Narayanan et al. 2021, arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime.errors import ScheduleError
from autopart.runtime.schedule.actions import Edges, Schedule
from autopart.runtime.schedule.exchanges import Step, with_exchanges
from autopart.runtime.schedule.flushing import stages_by_rank


def looped(stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage: round and round. Raises ScheduleError unless each rank gets as many."""
    if ranks < 1 or stages % ranks:
        raise ScheduleError(f"{stages} stages do not divide over {ranks} ranks; use a multiple of {ranks}")
    return tuple(stage % ranks for stage in range(stages))


def interleaved(
    stages: int,
    microbatches: int,
    edges: Edges,
    gradient_edges: Edges | None = None,
    places: Sequence[int] | None = None,
) -> Schedule:
    """1F1B over v = stages / p stages per rank: the bubble is 1/v of 1F1B's, for v times the messages (section 2.2).

    Microbatches pass in groups of p: a group through a rank's first stage, then through its second. Rank r starts with
    ``2 (p - r - 1) + (v - 1) p`` forwards. Raises ScheduleError unless the stages go round over the ranks and the
    microbatches are a multiple of p, as the order needs.
    """
    ranks = len(stages_by_rank(stages, places))
    check(stages, ranks, microbatches, places)
    order = []
    for rank in range(ranks):
        forwards = [position(ranks, stages // ranks, n) for n in range(microbatches * stages // ranks)]
        first = min(warmup(ranks, stages // ranks, rank), len(forwards))
        steps: list[Step] = []
        for n in range(len(forwards) + first):
            if n < len(forwards):
                chunk, k = forwards[n]
                steps.append(("F", chunk * ranks + rank, k))
            if n >= first:
                chunk, k = forwards[n - first]
                steps.append(("B", stages - (chunk + 1) * ranks + rank, k))
        order.append(steps)
    return with_exchanges(order, edges, gradient_edges, reduce=True)


def check(stages: int, ranks: int, microbatches: int, places: Sequence[int] | None) -> None:
    """Raises ScheduleError where interleaving does not run."""
    if places is not None and tuple(places) != looped(stages, ranks):
        raise ScheduleError(f"interleaved runs stage s on rank s mod {ranks}, not {list(places)}")
    if microbatches % ranks:
        raise ScheduleError(
            f"interleaved passes microbatches in groups of {ranks}, one per rank; {microbatches} do not divide, use a "
            f"multiple of {ranks}"
        )


def warmup(ranks: int, chunks: int, rank: int) -> int:
    """Forwards of a rank before its first backward's pair, over all its stages; with one stage each, 1F1B's."""
    return ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks


def position(ranks: int, chunks: int, n: int) -> tuple[int, int]:
    """The chunk (a rank's first, second, ... stage) and the microbatch of a rank's n-th forward."""
    group, inside = divmod(n, ranks * chunks)
    return inside // ranks, group * ranks + inside % ranks


def in_flight(stages: int, ranks: int, microbatches: int) -> tuple[int, ...]:
    """Most microbatches of each stage between its forward and backward.

    When rank r has done n forwards it has done n - 1 - w_r backwards, w_r its warm-up. Of the first n forwards
    N(n, c) = p ⌊n / pv⌋ + min(p, max(0, n mod pv - c p)) are of chunk c, and as many of the first n backwards of chunk
    v - 1 - c. So chunk c holds N(n, c) - N(n - 1 - w_r, v - 1 - c), most when it has just done a group, n = (c + 1) p
    mod pv.
    """
    chunks = stages // ranks
    period = ranks * chunks

    def done(n: int, chunk: int) -> int:
        n = min(max(n, 0), microbatches * chunks)
        return ranks * (n // period) + min(ranks, max(0, n % period - chunk * ranks))

    return tuple(
        max(
            done(n, stage // ranks) - done(n - 1 - warmup(ranks, chunks, stage % ranks), chunks - 1 - stage // ranks)
            for n in range((stage // ranks + 1) * ranks, microbatches * chunks + 1, period)
        )
        for stage in range(stages)
    )

"""Schedules as printable lists of actions, one list per stage.

An action is written as its letters, the stage, a dot and the microbatch; exchanges name the peer stage:

===========  ====================================================================================
``F0.3``     forward of stage 0 on microbatch 3
``B0.3``     backward; ``W0.3``: the weights' share of it, where a schedule does that separately
``SA0.3>1``  stage 0 sends its activations of microbatch 3 to stage 1; ``RA1.3<0``: stage 1 receives them
``SG1.3>0``  stage 1 sends their gradients back; ``RG0.3<1``: stage 0 receives them
``R0``       stage 0 sums its gradients over replicas, once per step
===========  ====================================================================================

Sends do not block; a receive has to be complete before the next forward or backward of its microbatch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopart.runtime.errors import ScheduleError

Edges = Collection[tuple[int, int]]


class Work(enum.Enum):
    """What an action does; the value is its text."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    REDUCE = "R"

    @property
    def is_send(self) -> bool:
        return self in (Work.SEND_ACTIVATION, Work.SEND_GRADIENT)

    @property
    def is_receive(self) -> bool:
        return self in (Work.RECV_ACTIVATION, Work.RECV_GRADIENT)

    @property
    def is_compute(self) -> bool:
        return self in (Work.FORWARD, Work.BACKWARD, Work.WEIGHT)


_ACTION_TEXT = re.compile(r"([A-Z]+)(\d+)(?:\.(\d+))?(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a stage does. microbatch: None for REDUCE alone. peer: the other stage of an exchange."""

    work: Work
    stage: int
    microbatch: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        if (self.work is Work.REDUCE) != (self.microbatch is None):
            raise ScheduleError(f"{self.work.name} {'has no' if self.microbatch is not None else 'needs a'} microbatch")
        if (self.work.is_send or self.work.is_receive) != (self.peer is not None):
            raise ScheduleError(f"{self.work.name} {'needs a' if self.peer is None else 'has no'} peer stage")
        if self.peer == self.stage:
            raise ScheduleError(f"stage {self.stage} cannot exchange with itself")

    def __str__(self) -> str:
        text = f"{self.work.value}{self.stage}"
        if self.microbatch is not None:
            text += f".{self.microbatch}"
        if self.peer is not None:
            text += f"{'>' if self.work.is_send else '<'}{self.peer}"
        return text

    @staticmethod
    def parse(text: str) -> Action:
        """Reads what ``str`` writes. Raises ScheduleError."""
        match = _ACTION_TEXT.fullmatch(text)
        if match is None or match[1] not in Work._value2member_map_:
            raise ScheduleError(f"not an action: {text!r}; expected such as F0.3, B0.3, SA0.3>1, RG0.3<1 or R0")
        work = Work(match[1])
        if match[4] is not None and (match[4] == ">") != work.is_send:
            raise ScheduleError(f"not an action: {text!r}; '>' goes with sends and '<' with receives")
        number = None if match[3] is None else int(match[3])
        return Action(work, int(match[2]), number, None if match[5] is None else int(match[5]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """All stages' action lists; its text has one line per stage."""

    stages: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for index, actions in enumerate(self.stages):
            for action in actions:
                if action.stage != index:
                    raise ScheduleError(f"{action} stands in the list of stage {index}")

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.stages)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads what ``str`` writes. Raises ScheduleError."""
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return Schedule(tuple(tuple(map(Action.parse, line.split())) for line in lines))


def make_schedule(
    name: str,
    stages: int,
    microbatches: int,
    edges: Edges,
    gradient_edges: Edges | None = None,
    warmup: Sequence[int] = (),
) -> Schedule:
    """The schedule of that name: "gpipe", "1f1b", "forward_only", or the text of one. Raises ScheduleError.

    warmup: of 1F1B, see :func:`one_f_one_b`; empty: the least.
    """
    if name == "1f1b":
        return one_f_one_b(stages, microbatches, edges, warmup or None, gradient_edges)
    if warmup:
        raise ScheduleError(f"only 1f1b has a warm-up, not {name}; leave warmup out")
    if name == "gpipe":
        return gpipe(stages, microbatches, edges, gradient_edges)
    if name == "forward_only":
        return forward_only(stages, microbatches, edges)
    if "." not in name:
        raise ScheduleError(f"no schedule is called {name!r}; there are 'gpipe', '1f1b' and 'forward_only'")
    return Schedule.parse(name)


def gpipe(stages: int, microbatches: int, edges: Edges, gradient_edges: Edges | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): ``microbatches`` are in flight on every stage.

    edges: the (source stage, target stage) pairs that exchange values. gradient_edges: those of them whose values have
    a gradient; by default all.
    """
    order = [[("F", k) for k in range(microbatches)] + [("B", k) for k in range(microbatches)]] * stages
    return with_exchanges(order, edges, edges if gradient_edges is None else gradient_edges, reduce=True)


def one_f_one_b(
    stages: int,
    microbatches: int,
    edges: Edges,
    warmup: Sequence[int] | None = None,
    gradient_edges: Edges | None = None,
) -> Schedule:
    """One forward, one backward in turn, after a warm-up (Narayanan et al. 2019, PipeDream-flush).

    warmup: forwards of each stage before its first pair; by default ``stages - s - 1``, so that stage ``s`` has
    ``min(microbatches, stages - s)`` microbatches in flight. More of them hide slow transfers for more memory, see
    :func:`deeper_warmup`. Raises ScheduleError when the warm-up has the wrong length or is negative.
    """
    if warmup is None:
        warmup = [stages - s - 1 for s in range(stages)]
    if len(warmup) != stages or any(count < 0 for count in warmup):
        raise ScheduleError(f"warmup needs one number of forwards for each of {stages} stages, found {list(warmup)}")
    order = []
    for count in warmup:
        first = min(count, microbatches)
        steady = [pair for k in range(microbatches - first) for pair in (("F", first + k), ("B", k))]
        rest = [("B", k) for k in range(microbatches - first, microbatches)]
        order.append([("F", k) for k in range(first)] + steady + rest)
    return with_exchanges(order, edges, edges if gradient_edges is None else gradient_edges, reduce=True)


def deeper_warmup(stages: int, depth: int) -> tuple[int, ...]:
    """The warm-up in which each stage is ``depth`` forwards ahead of the next: ``depth * (stages - s - 1)``.

    1 is the least with which equal stages never wait but for transfers. With 2 a transfer there and one back pass while
    another microbatch is computed: a stage waits for neither as long as the two take no longer than one forward and
    backward. 0 leaves one microbatch in the whole pipeline. BaPipe (Zhao et al. 2020, arXiv 2012.12544) has two such
    depths, 1F1B-SNO and 1F1B-SO.
    """
    return tuple(depth * (stages - stage - 1) for stage in range(stages))


def in_flight(name: str, stages: int, microbatches: int, warmup: Sequence[int] = ()) -> tuple[int, ...]:
    """Most microbatches that each stage holds at once under "gpipe" or "1f1b": m, or min(m, warm-up + 1)."""
    if name == "gpipe":
        return (microbatches,) * stages
    return tuple(min(microbatches, count + 1) for count in warmup or deeper_warmup(stages, 1))


def forward_only(stages: int, microbatches: int, edges: Edges) -> Schedule:
    """Forwards in order, for evaluation."""
    return with_exchanges([[("F", k) for k in range(microbatches)]] * stages, edges, (), reduce=False)


def forward_part(schedule: Schedule) -> Schedule:
    """The schedule's forwards and their exchanges, in order."""
    keep = (Work.FORWARD, Work.SEND_ACTIVATION, Work.RECV_ACTIVATION)
    return Schedule(tuple(tuple(a for a in actions if a.work in keep) for actions in schedule.stages))


def backward_part(schedule: Schedule) -> Schedule:
    """What :func:`forward_part` leaves."""
    leave = (Work.FORWARD, Work.SEND_ACTIVATION, Work.RECV_ACTIVATION)
    return Schedule(tuple(tuple(a for a in actions if a.work not in leave) for actions in schedule.stages))


def with_exchanges(
    order: Sequence[Sequence[tuple[str, int]]], edges: Edges, gradient_edges: Edges, reduce: bool
) -> Schedule:
    """The schedule of each stage's computations, as ("F" or "B", microbatch): receives right before, sends right after.

    edges, gradient_edges: as in :func:`gpipe`. reduce: with the gradients' sum at the end. Raises ScheduleError.
    """
    for source, target in (*edges, *gradient_edges):
        if not 0 <= source < target < len(order):
            raise ScheduleError(f"values cannot go from stage {source} to stage {target} of {len(order)}")
    stages = []
    for stage, steps in enumerate(order):
        before = sorted(a for a, b in set(edges) if b == stage)
        after = sorted(b for a, b in set(edges) if a == stage)
        back_from = sorted(b for a, b in set(gradient_edges) if a == stage)
        back_to = sorted(a for a, b in set(gradient_edges) if b == stage)
        actions: list[Action] = []
        for work, k in steps:
            if work == "F":
                actions += [Action(Work.RECV_ACTIVATION, stage, k, peer) for peer in before]
                actions.append(Action(Work.FORWARD, stage, k))
                actions += [Action(Work.SEND_ACTIVATION, stage, k, peer) for peer in after]
            else:
                actions += [Action(Work.RECV_GRADIENT, stage, k, peer) for peer in back_from]
                actions.append(Action(Work.BACKWARD, stage, k))
                actions += [Action(Work.SEND_GRADIENT, stage, k, peer) for peer in back_to]
        if reduce:
            actions.append(Action(Work.REDUCE, stage))
        stages.append(tuple(actions))
    return Schedule(tuple(stages))


def post_receives_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same actions with each receive moved before the computation that precedes it.

    The transfer then runs during that computation; it costs one more buffer. The order among receives stays.
    """
    moved: list[Action] = []
    last_compute = 0  # position of the last computation in `moved`; receives gather before it
    for action in actions:
        if action.work.is_receive:
            moved.insert(last_compute, action)
            last_compute += 1
        else:
            if action.work.is_compute:
                last_compute = len(moved)
            moved.append(action)
    return tuple(moved)

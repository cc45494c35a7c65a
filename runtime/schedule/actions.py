"""Schedules as printable lists of actions, one list for each rank of the pipeline.

A rank of the pipeline is a group of devices that runs one stage or several (virtual stages): stages on one rank share
its list. An action is written as its letters, the stage, a dot and the microbatch; exchanges name the peer stage:

===========  ====================================================================================
``F0.3``     forward of stage 0 on microbatch 3
``B0.3``     backward; where a schedule has ``W0.3``, the weights' share of it, B computes the inputs' gradients alone
``SA0.3>1``  stage 0 sends its activations of microbatch 3 to stage 1; ``RA1.3<0``: stage 1 receives them
``SG1.3>0``  stage 1 sends their gradients back; ``RG0.3<1``: stage 0 receives them
``R0``       stage 0 sums its gradients over replicas, once per step
===========  ====================================================================================

Sends do not block; a receive has to be complete before the next forward or backward of its microbatch. Stages on one
rank exchange with the same actions, which hand the values over in memory.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

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

    # attributes rather than properties: long schedules ask each action
    is_send: bool
    is_receive: bool
    is_compute: bool

    def __init__(self, letters: str) -> None:
        self.is_send = letters in ("SA", "SG")
        self.is_receive = letters in ("RA", "RG")
        self.is_compute = letters in ("F", "B", "W")


SEND_OF: Final = {Work.RECV_ACTIVATION: Work.SEND_ACTIVATION, Work.RECV_GRADIENT: Work.SEND_GRADIENT}
"""The other side of a receive."""

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

    @property
    def edge(self) -> tuple[int, int]:
        """The (source stage, target stage) of the values that an exchange is about: gradients go back along it."""
        assert self.peer is not None
        here_first = self.work in (Work.SEND_ACTIVATION, Work.RECV_GRADIENT)
        return (self.stage, self.peer) if here_first else (self.peer, self.stage)

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
    """All ranks' action lists; its text has one line per rank of the pipeline.

    Raises ScheduleError when two ranks' lists have actions of one stage.
    """

    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        home: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if home.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"{action} stands in the list of rank {rank}, other actions of stage {action.stage} in that "
                        f"of rank {home[action.stage]}; a stage is run by one rank"
                    )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((action.stage for actions in self.ranks for action in actions), default=-1)

    @property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage that has actions."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Reads what ``str`` writes. Raises ScheduleError."""
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return Schedule(tuple(tuple(map(Action.parse, line.split())) for line in lines))

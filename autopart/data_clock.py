"""What replicas' exchange for divided parameters adds to a stage's forward and backward, beside what is computed.

As :mod:`autopart.runtime.data_weights` runs it. A unit of level 3 is gathered when the one before it, in the pass, has
arrived, the first when it is read; in the backward once more, where something keeps its weights. A unit's gradients
are summed once all of them are made, level 2's as a message of them is full. What sums is waited for before the next
one of level 3 starts, of level 2 before one for which there is no room beside it, and at the end of the step: that of a
backward's last, which the next microbatch hides, is spread over all. Messages pass one after another, in the order in
which they are begun.

Whole weights of levels 1 and 2 arrive when a step begins. In the first stage some messages are on their way at once:
the first begin with the call, others when one before them is read, and the first forward waits for what it reads.
Others wait for all of theirs before they wait for the stages before.

A split backward counts as a whole one: messages pass beside W as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.cost.communication import ALL_GATHER, REDUCE_SCATTER, collective_seconds
from autopart.cost.devices import Link
from autopart.exchanges import Exchanges
from autopart.passes.data_axis import UnitMessages
from autopart.runtime.data_weights import sent_ahead, summed_beside

_Sent = Sequence[tuple[float, float, int]]
_NOTHING: Mapping[int, _Sent] = {}


@dataclass(frozen=True, slots=True)
class Computed:
    """One pass without what replicas exchange. spans: of each op when it starts and when it is through, in seconds."""

    seconds: float
    spans: Mapping[fx.Node, tuple[float, float]]

    def longer(self, seconds: float) -> Computed:
        """With so much more to do, evenly over all of the pass."""
        if not self.seconds or not seconds:
            return Computed(self.seconds + seconds, self.spans)
        times = 1 + seconds / self.seconds
        spans = {node: (start * times, end * times) for node, (start, end) in self.spans.items()}
        return Computed(self.seconds + seconds, spans)


@dataclass(slots=True)
class _Messages:
    """Those of one pass. limit: bytes that fill one. waited: seconds by which computing waited for them so far."""

    limit: int
    waited: float = 0.0
    _busy: float = 0.0
    _gathered: float | None = None  # when the message that was begun ahead has arrived
    _summed: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # by level, when sums end; their bytes

    def begin(self, now: float, seconds: float) -> float:
        """When a message that is begun now has passed."""
        self._busy = max(now, self._busy) + seconds
        return self._busy

    def wait(self, at: float, end: float) -> float:
        """at: when computing would be here without messages. The time when it goes on."""
        self.waited = max(self.waited, end - at)
        return at + self.waited

    def gather(self, at: float, seconds: float, following: float | None) -> None:
        """A unit is read. following: seconds of the next one's message, which is begun then."""
        end = self.begin(at + self.waited, seconds) if self._gathered is None else self._gathered
        now = self.wait(at, end)
        self._gathered = None if following is None else self.begin(now, following)

    def sum(self, at: float, seconds: float, size: int, level: int) -> None:
        """Gradients are made."""
        flying, now = self._summed.setdefault(level, []), at + self.waited
        while flying and (level == 3 or not summed_beside([own for _, own in flying], size, self.limit)):
            now = self.wait(at, flying.pop(0)[0])
        flying.append((self.begin(now, seconds), size))

    def end(self, at: float, microbatches: int) -> float:
        """Seconds of the pass, of which ``at`` without messages."""
        here = at + self.waited
        ends = (flying[-1][0] for flying in self._summed.values())
        return here + max([0.0, *(end - here for end in ends)]) / microbatches


@dataclass(frozen=True, slots=True)
class DataClock:
    """Of one stage. microbatches: of a step."""

    exchanged: Exchanges
    replicas: int
    link: Link
    microbatches: int

    def passes(self, forward: Computed, backward: Computed) -> tuple[float, float, float]:
        """Seconds of the forward and of the backward with what replicas exchange, and what of that passes unseen."""
        units = self.exchanged.units
        gathers = [self._event(_start(unit, forward), ALL_GATHER, unit.gathered) for unit in units]
        again = [self._event(_start(unit, backward), ALL_GATHER, unit.gathered_again) for unit in units]
        sums = [self._event(_last(unit.readers, backward), REDUCE_SCATTER, unit.summed) for unit in units]
        full = list(self._full(backward))
        whole = sum(seconds for _, seconds, _ in (*gathers, *again, *sums, *full))
        if not whole:
            return forward.seconds, backward.seconds, 0.0
        there, back = self._pass(forward, gathers), self._pass(backward, again, {2: full, 3: sums})
        back = max(back, whole - there)  # what goes on into the next microbatch holds up its messages
        return there, back, whole - (there + back - forward.seconds - backward.seconds)

    def arrival(self, forward: Computed, ahead: float) -> float:
        """For how long the first forward of a step waits for whole weights of levels 1 and 2.

        ahead: seconds that it begins after the step, on stages behind others; 0: the first stage.
        """
        messages = self.exchanged.arriving
        if ahead:
            return max(0.0, sum(self._seconds(ALL_GATHER, message.size) for message in messages) - ahead)
        reads = sorted(
            (_first(message.readers, forward), number)
            for number, message in enumerate(messages)
            if any(node in forward.spans for node in message.readers)
        )
        left, flying = list(range(len(messages))), dict[int, float]()  # to be sent; when those on their way are there
        busy = waited = 0.0
        window = self.exchanged.read + self.exchanged.limit

        def send(number: int, now: float) -> None:
            nonlocal busy
            left.remove(number)
            busy = flying[number] = max(busy, now) + self._seconds(ALL_GATHER, messages[number].size)

        def send_ahead(now: float) -> None:
            while left and sent_ahead([messages[number].size for number in flying], messages[left[0]].size, window):
                send(left[0], now)

        send_ahead(0.0)
        for at, number in reads:
            if number in left:
                send(number, at + waited)
            waited = max(waited, flying.pop(number) - at)
            send_ahead(at + waited)
        return waited

    def _full(self, backward: Computed) -> Iterator[tuple[float, float, int]]:
        """Level 2's sums, and when their messages are full and those before them."""
        full = 0.0
        for message in self.exchanged.scattered:
            full = max(full, _last(message.readers, backward))
            yield self._event(full, REDUCE_SCATTER, message.size)

    def _pass(self, computed: Computed, gathers: _Sent, sums: Mapping[int, _Sent] = _NOTHING) -> float:
        """gathers: when a unit is read, sums: by level when gradients are made; seconds and bytes of the message."""
        gathers = sorted(event for event in gathers if event[1])
        messages = _Messages(self.exchanged.limit)
        following = [*(seconds for _, seconds, _ in gathers[1:]), None]
        events = [(0, event) for event in gathers]
        events += [(level, event) for level, found in sums.items() for event in found if event[1]]
        for level, (at, seconds, size) in sorted(events, key=lambda item: (item[1][0], item[0])):
            if level:
                messages.sum(at, seconds, size, level)
            else:
                messages.gather(at, seconds, following.pop(0))
        return messages.end(computed.seconds, self.microbatches)

    def _event(self, at: float, kind: str, size: int) -> tuple[float, float, int]:
        return at, self._seconds(kind, size), size

    def _seconds(self, kind: str, size: int) -> float:
        return collective_seconds(kind, size, self.replicas, self.link) if size else 0.0


def _start(unit: UnitMessages, computed: Computed) -> float:
    return _first(unit.readers, computed)


def _first(readers: Sequence[fx.Node], computed: Computed) -> float:
    """When the first of these begins."""
    return min((computed.spans[node][0] for node in readers if node in computed.spans), default=0.0)


def _last(readers: Sequence[fx.Node], computed: Computed) -> float:
    """When all of these are through."""
    return max((computed.spans[node][1] for node in readers if node in computed.spans), default=computed.seconds)

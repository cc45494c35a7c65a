"""What a rank holds of messages in which gradients are summed and whole weights gathered, beside what it always holds.

As :mod:`autopart.runtime.gradients` and :mod:`autopart.runtime.data_weights` send them: tensors that are treated alike
share messages of up to l bytes (:mod:`autopart.bucket_size`); a larger one is a message by itself, and no copy of its
gradient where it is cut in its first dim. Of parameters with G bytes of gradients on a rank, at a level of ZeRO over r
replicas, a message of several takes c = min(G, l) bytes of gradients. The largest of all takes b, the largest beside it
b', and the largest that is a copy k. Besides what :mod:`autopart.data_prices` says of them a rank holds

=====  ===========  ===================  ====================================================================
level  all step     while one is made    which is
=====  ===========  ===================  ====================================================================
0      -            c                    the message beside its gradients (one alone is its own message)
1      G / r        k                    what arrives, until the end of the step; the same
2      -            n + d + d / r        gradients, with messages before and what arrives (n is b or b', d the other
                                         and 4 l); or with their own, a copy (n is 2 k), and what is left then
3      -            -                    what is gathered and summed layer by layer is counted with the layer
=====  ===========  ===================  ====================================================================

Where sums have a type of their own, s bytes for each, there is a converted message besides (s b), what is on its way
is s times that, and at levels 0 and 1 messages stay until the end of the step (less the gradients: (s - 1) G). At the
start of a call, when there are no gradients, the first whole weights of levels 1 and 2 are on their way, each message
beside the shares that are put together for it: two, or as many as one layer reads and one more.

What stays all step is counted with each parameter (:func:`staying_bytes`), the rest for each stage's own parameters
(:mod:`autopart.solver.stages_passing`). Gradients that wait for their turn behind others' messages are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.runtime.data_weights import BESIDE

Bytes = float | NDArray[np.float64]
"""Of one stage, or of several at once."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Trained parameters that share messages: bytes of their gradients on a rank, in all and of the largest.

    second: of the largest but for that one. copied: of the largest that is larger than a message and no message by
    itself, as it is not cut in its first dim; 0 where there is none. read: of what one layer, or op outside of layers,
    reads, at most.
    """

    level: int
    bytes: Bytes
    largest: Bytes
    second: Bytes
    copied: Bytes
    read: Bytes

    def messages(self, limit: float) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """Bytes of gradients in one message of no more than ``limit``, or of one larger tensor, at most: in the first,
        in any beside it, in any that is a copy, and in any but the first that is one. An only message goes beside that
        of the microbatch before.
        """
        first = np.minimum(self.bytes, np.maximum(limit, self.largest))
        rest, apart = self.bytes - self.largest, self.largest > limit
        beside = np.where(apart & (rest > 0), np.minimum(rest, np.maximum(limit, self.second)), first)
        shared = np.where(apart, np.minimum(rest, limit), first)
        other = np.maximum(shared, np.where(self.copied < first, self.copied, np.minimum(self.copied, beside)))
        return first, beside, np.maximum(shared, self.copied), other


def staying_bytes(level: int, gradient: float, replicas: int, summed: float) -> float:
    """What messages of a parameter hold until the end of a step. gradient: bytes on a rank. summed: as of
    :func:`message_bytes`.
    """
    if level > 1:
        return 0.0
    converted = max(0.0, summed - 1.0) * gradient
    return converted + (summed * gradient / replicas if level else 0.0)


def message_bytes(parameters: Iterable[Alike], replicas: int, summed: float, limit: float) -> Bytes:
    """What is held for a while. summed: bytes in the type of the sum for each byte of a gradient. limit: bytes that
    fill a message.
    """
    making: Bytes = 0.0
    arriving: Bytes = 0.0

    def converted(size: Bytes) -> Bytes:
        return summed * size if summed != 1.0 else 0.0

    for alike in parameters:
        first, beside, copied, other = alike.messages(limit)
        whole, sent = alike.bytes, summed * (1 + 1 / replicas)
        if alike.level == 0:
            making = np.maximum(making, np.minimum(whole, limit) + converted(first))
        elif alike.level == 1:
            making = np.maximum(making, np.maximum(copied + converted(copied), converted(first)))
        elif alike.level == 2:
            room = BESIDE * limit / summed  # of gradients whose messages are on their way beside the largest
            # where few are all on their way, the first may be made beside that of the microbatch before
            again = np.where(whole - first <= room, first, beside)
            for made, largest in ((first, again), (beside, first)):
                making = np.maximum(making, made + sent * np.minimum(whole, largest + room))
            apart = np.where(copied < first, first, beside)
            kinds = (1, first, beside), (1, beside, first), (2, copied, apart), (2, other, first)
            for copies, made, largest in kinds:  # beside what was not waited for first
                flying = np.maximum(room, np.where(made <= room, largest + room - made, 0.0))
                flying = sent * np.minimum(whole - made, flying)
                making = np.maximum(making, copies * made + converted(made) + flying)
        if alike.level in (1, 2):
            coming = np.minimum(whole, np.maximum(first + beside, alike.read + limit)) * (1 + 1 / replicas)
            arriving = arriving + np.maximum(0.0, coming - (whole if alike.level == 1 else whole / replicas))
    return np.maximum(making, arriving)

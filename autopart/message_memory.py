"""What a rank holds of messages in which gradients are summed and whole weights gathered, beside what it always holds.

As :mod:`autopart.runtime.gradients` and :mod:`autopart.runtime.data_weights` send them: tensors that are treated alike
share messages of up to l bytes (:mod:`autopart.bucket_size`); a larger one is a message by itself, and no copy of its
gradient where it is cut in its first dim. Of parameters with G bytes of gradients on a rank, at a level of ZeRO over r
replicas, a message of several takes c = min(G, l) bytes of gradients, the largest of all takes b. Besides what
:mod:`autopart.data_prices` says of them a rank holds

=====  ===========  ==================  =====================================================================
level  to the end   while one is made   which is
=====  ===========  ==================  =====================================================================
0      -            c                   the message beside its gradients
1      G / r        c                   what arrives; the same
2      -            c + d + d / r       gradients of a message to be, with those on their way and what arrives of them
                                        (d is b and 4 l); or with the message (c more), and what is left then
3      -            -                   what is gathered and summed layer by layer is counted with the layer
=====  ===========  ==================  =====================================================================

A single gradient that is larger than l is among what the op takes that makes it (:mod:`autopart.block_costs`); its copy
counts there at levels 0 and 1, and at level 3 outside of layers (:func:`single_bytes`), and at level 2 as c does that
is more.

Where sums have a type of their own, s bytes for each, there is a converted message besides (s b), what is on its way
is s times that, and at levels 0 and 1 messages stay to the end of the step (less the gradients: (s - 1) G). At the
start of a call, when there are no gradients, the first whole weights of levels 1 and 2 are on their way, each message
beside the shares that are put together for it: the largest, and beside it as many as one layer reads and one more
(:func:`arriving_bytes`).

What stays is counted with each parameter (:func:`staying_bytes`): it comes in the backward of the last microbatch, as
what that kept goes (:class:`autopart.solver.stages_parts.Block`). The rest is counted for each stage's own parameters
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

    copied: of the largest that is larger than a message and no message by itself, as it is not cut in its first dim; 0
    where there is none. read: of what one layer, or op outside of layers, reads, at most.
    """

    level: int
    bytes: Bytes
    largest: Bytes
    copied: Bytes
    read: Bytes

    def messages(self, limit: float) -> tuple[Bytes, Bytes]:
        """Bytes of gradients in one message of no more than ``limit``, or of one larger tensor, at most: in any, and in
        one that several share.
        """
        first = np.minimum(self.bytes, np.maximum(limit, self.largest))
        return first, np.where(self.largest > limit, np.minimum(self.bytes - self.largest, limit), first)


def staying_bytes(level: int, gradient: float, replicas: int, summed: float) -> float:
    """What messages of a parameter hold until the end of a step. gradient: bytes on a rank. summed: as of
    :func:`message_bytes`.
    """
    if level > 1:
        return 0.0
    converted = max(0.0, summed - 1.0) * gradient
    return converted + (summed * gradient / replicas if level else 0.0)


def single_bytes(level: int, gradient: float, first: bool, summed: float, limit: float) -> float:
    """What a message of one gradient takes while it is made, beside that and its op, at levels 0 and 1, and at level 3
    outside of layers; 0 where it shares one. first: replicas cut it in its first dim. The others are as of
    :func:`message_bytes`.
    """
    if gradient <= limit or level == 2:
        return 0.0
    copied = gradient if level and not first else 0.0
    return copied + (summed * gradient if summed != 1.0 and level < 2 else 0.0)


def message_bytes(parameters: Iterable[Alike], replicas: int, summed: float, limit: float) -> Bytes:
    """What is held for a while in backwards. summed: bytes in the type of the sum for each byte of a gradient. limit:
    bytes that fill a message.
    """
    making: Bytes = 0.0

    def converted(size: Bytes) -> Bytes:
        return summed * size if summed != 1.0 else 0.0

    sent, room = summed * (1 + 1 / replicas), BESIDE * limit / summed
    whole: Bytes = 0.0  # gradients of level 2, whose messages follow each other whatever they share
    largest: Bytes = 0.0
    filling: Bytes = 0.0
    copied: list[Bytes] = []
    for alike in parameters:
        first, shared = alike.messages(limit)
        if alike.level < 2:
            making = np.maximum(making, shared + converted(shared))
        elif alike.level == 2:
            whole, largest = whole + alike.bytes, np.maximum(largest, first)
            filling = filling + shared
            copied += alike.copied, shared
    most = filling + sent * np.minimum(whole, largest + room)
    for made in copied:  # beside what was not waited for first
        flying = np.maximum(room, np.where(made <= room, largest + room - made, 0.0))
        held = filling + made + converted(made) + sent * np.minimum(whole - made, flying)
        most = np.maximum(most, np.where(made > 0, held, 0.0))
    return np.maximum(making, most)


def arriving_bytes(parameters: Iterable[Alike], replicas: int, limit: float) -> Bytes:
    """What whole weights that arrive in the first forward of a call take, beyond gradients, which are not there yet."""
    arriving: Bytes = 0.0
    for alike in parameters:
        if alike.level in (1, 2):
            first, _ = alike.messages(limit)
            coming = np.minimum(alike.bytes, first + alike.read + limit) * (1 + 1 / replicas)
            arriving = arriving + np.maximum(0.0, coming - alike.bytes / (1 if alike.level == 1 else replicas))
    return arriving

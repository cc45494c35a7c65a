"""What a rank holds of messages in which gradients are summed and whole weights gathered, beside what it always holds.

As :mod:`autopart.runtime.gradients` and :mod:`autopart.runtime.data_weights` send them: tensors that are treated alike
share messages of up to l bytes (:mod:`autopart.bucket_size`), or of one larger tensor. Of parameters
with G bytes of gradients on a rank, at a level of ZeRO over r replicas, a message takes b = min(G, max(l, the largest))
bytes of gradients, and one of several c = min(G, l). Besides what :mod:`autopart.data_prices` says of them a rank holds

=====  ===========  ===================  ====================================================================
level  all step     while one is made    which is
=====  ===========  ===================  ====================================================================
0      -            c                    the message beside its gradients (one alone is its own message)
1      G / r        b                    what arrives, until the end of the step; the same
2      -            3 b + b / r          the same, with the gradients; and the message before, with what arrives
3      -            -                    what is gathered and summed layer by layer is counted with the layer
=====  ===========  ===================  ====================================================================

Where sums have a type of their own, s bytes for each, there is a converted message besides (s b), what is on its way
is s times that, and at levels 0 and 1 messages stay until the end of the step (less the gradients: (s - 1) G). At the
start of a call, when there are no gradients, the first whole weights of levels 1 and 2 are on their way, each message
beside the shares that are put together for it.

What stays all step is counted with each parameter (:func:`staying_bytes`), the rest for each stage's own parameters
(:mod:`autopart.solver.stages_passing`). Gradients that wait for their turn behind others' messages are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.runtime.data_weights import AHEAD

Bytes = float | NDArray[np.float64]
"""Of one stage, or of several at once."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Trained parameters that share messages: bytes of their gradients on a rank, in all and of the largest."""

    level: int
    bytes: Bytes
    largest: Bytes

    def message(self, limit: float) -> Bytes:
        """Bytes of gradients in one message of no more than ``limit``, or of one larger tensor, at most."""
        return np.minimum(self.bytes, np.maximum(limit, self.largest))


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
    for alike in parameters:
        size, whole = alike.message(limit), alike.bytes
        converted = summed * size if summed != 1.0 else 0.0
        if alike.level == 0:
            making = np.maximum(making, np.minimum(whole, limit) + converted)
        elif alike.level == 1:
            making = np.maximum(making, size + converted)
        elif alike.level == 2:
            making = np.maximum(making, 2 * size + converted + summed * size * (1 + 1 / replicas))
        if alike.level in (1, 2):
            flying = np.minimum(whole, AHEAD * size) * (1 + 1 / replicas)
            arriving = arriving + np.maximum(0.0, flying - (whole if alike.level == 1 else whole / replicas))
    return np.maximum(making, arriving)

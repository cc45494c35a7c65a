r"""How many bytes of gradients share a message: few let more of the sums pass unseen, many save messages.

A stage's gradients take S seconds to sum over its replicas, and each message a seconds besides. In n messages the last
one, which leaves when the backward is over, takes S / n, and all of them n a. The sum of both is least for::

    n = sqrt(S / a)

Among hundreds of replicas a is milliseconds, on slow networks S is long for few bytes.
"""

from __future__ import annotations

import math

from autopart.cost.communication import ALL_REDUCE, collective_seconds
from autopart.cost.devices import Link
from autopart.runtime.buckets import BUCKET_BYTES

UNIT = 2**20
"""Messages have whole MiB, and one at least."""
MOST_BYTES = 200 * UNIT
"""Up to three messages are held at once (:mod:`autopart.message_memory`): more would be felt."""


def bucket_bytes(gradients: float, summed: float, replicas: int, link: Link) -> int:
    """What fills a message, in bytes of gradients, of which a rank of the stage has so many in all.

    summed: bytes that are sent for each of them.
    """
    if replicas == 1:
        return BUCKET_BYTES
    call = collective_seconds(ALL_REDUCE, 0, replicas, link)
    whole = collective_seconds(ALL_REDUCE, gradients * summed, replicas, link) - call
    size = gradients * math.sqrt(call / whole) if whole else BUCKET_BYTES
    return min(MOST_BYTES, max(UNIT, round(size / UNIT) * UNIT))

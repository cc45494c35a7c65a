"""Ops on a shard of a dim that the op itself cannot be run on: these functions know their rank's place on the axis.

Each has the arguments of the op that it stands for, tensors first, and ``axis``, on which a shard has ``1/axis.size``
of the dim, in rank order; products panel by panel have two axes, ``rows`` and ``columns``. What one exchanges is
declared with the op's rule, and counted under the axis' name. :func:`joined` makes one axis of several.
"""

from autopart.runtime.local_forms.attention import query_sharded_attention
from autopart.runtime.local_forms.experts import (
    combine_experts_product,
    dispatch_experts_product,
    exchange_experts_product,
    group_experts_product,
    group_look_up,
    own_experts_product,
    own_places,
)
from autopart.runtime.local_forms.norms import partial_mean, sharded_group_norm, sharded_layer_norm, sharded_rms_norm
from autopart.runtime.local_forms.softmax import sharded_log_softmax, sharded_logsumexp, sharded_softmax
from autopart.runtime.local_forms.summa import summa_addmm, summa_linear, summa_matmul
from autopart.runtime.local_forms.vocabulary import vocab_cross_entropy, vocab_embedding
from autopart.runtime.mesh import joined

__all__ = [
    "combine_experts_product",
    "dispatch_experts_product",
    "exchange_experts_product",
    "group_experts_product",
    "group_look_up",
    "joined",
    "own_experts_product",
    "own_places",
    "partial_mean",
    "query_sharded_attention",
    "sharded_group_norm",
    "sharded_layer_norm",
    "sharded_log_softmax",
    "sharded_logsumexp",
    "sharded_rms_norm",
    "sharded_softmax",
    "summa_addmm",
    "summa_linear",
    "summa_matmul",
    "vocab_cross_entropy",
    "vocab_embedding",
]

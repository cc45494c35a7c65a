"""Ops on a shard of a dim that the op itself cannot be run on: these functions know their rank's place on the axis.

Each has the arguments of the op that it stands for, tensors first, and ``axis``, on which a shard has ``1/axis.size``
of the dim, in rank order. What one exchanges is declared with the op's rule, and counted under the axis' name.
"""

from autopart.runtime.local_forms.attention import query_sharded_attention
from autopart.runtime.local_forms.vocabulary import vocab_cross_entropy, vocab_embedding

__all__ = ["query_sharded_attention", "vocab_cross_entropy", "vocab_embedding"]

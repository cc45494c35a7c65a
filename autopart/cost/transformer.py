"""Closed forms for GPT-2: parameters and matrix-product FLOPs.

Used to check annotations against, and to estimate without a model at hand. ``L`` layers, width ``d``, vocabulary
``V``, sequence length ``s``, MLP width ``f = 4d``: Narayanan et al., Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM (SC 2021) have ``12 L d^2 (1 + 13/(12 d) + (V + s)/(12 L d))`` parameters (equation 2;
the final norm's ``2d`` left out) and, forward only, ``24 b s L d^2 (1 + s/(6 d) + V/(12 L d))`` FLOPs (equation 3).
"""

from __future__ import annotations


def gpt2_parameters(layers: int, width: int, vocabulary: int, positions: int, mlp: int | None = None) -> int:
    """Parameters, the head tied to the embedding.

    Per layer: fused projection ``3d^2 + 3d``, output ``d^2 + d``, MLP ``2df + f + d``, two norms ``4d``.
    """
    inner = 4 * width if mlp is None else mlp
    block = 4 * width**2 + 4 * width + 2 * width * inner + inner + width + 4 * width
    return layers * block + (vocabulary + positions) * width + 2 * width


def gpt2_forward_flops(
    batch: int, sequence: int, layers: int, width: int, vocabulary: int, mlp: int | None = None
) -> int:
    """FLOPs of the forward's matrix products: projections, scores and weighted values, MLP, head."""
    inner = 4 * width if mlp is None else mlp
    per_token = layers * (8 * width**2 + 4 * width * inner + 4 * sequence * width) + 2 * width * vocabulary
    return batch * sequence * per_token

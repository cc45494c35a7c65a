"""What one device computes and sends for a GPT or Llama layer as Megatron-LM runs it: kernels, bytes, collectives.

``T = b s`` tokens of a microbatch, width ``d``, heads ``a`` of size ``d/a``, tensor-parallel degree ``t``. A weight is
cut by columns, then by rows (Shoeybi et al., Megatron-LM, arXiv 1909.08053), attention by heads; norms, residuals and
dropouts outside are computed by every rank. Attention is not fused: scores are written and read. Pointwise chains are
fused as in Megatron-LM: bias with GELU; bias, dropout and residual; scale, mask and softmax. Bytes at 2 per element,
1 per dropout mask's:

==========================  =====================================  ==============================================
elements                    forward                                backward
==========================  =====================================  ==============================================
layer norm, twice      Td   4: read, write                         10: gradient and input read twice, write
bias dropout add,      Td   7: two read, mask, write               7: read, mask, write, read for bias's gradient
twice
bias GELU         4 Td/t    4                                      8: two read, write, read for bias's gradient
bias of q, k, v   3 Td/t    4                                      2
attention's output  Td/t    4: permuted                            4
softmax        b a s^2/t    4                                      6
dropout        b a s^2/t    5                                      5
==========================  =====================================  ==============================================

Matrix products read and write their operands besides. A plain model has neither biases nor dropouts: its residual sum
moves 6 and nothing, the rotation of queries and keys 4 each, and a gated MLP's product 6 and 10 of the narrower width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from autopart.cost.compute import Product, copy_seconds, op_seconds, slower_attention
from autopart.cost.devices import Device

_HALF = 2


@dataclass(frozen=True, slots=True)
class Gpt:
    """Sizes of a GPT or Llama model.

    mlp: its MLP's width (default 4 width). kv_heads: of keys and values (default as many as heads). gated: the MLP has
    two matrices up, one a gate of the other (SwiGLU). untied: the head has a weight of its own. plain: no biases,
    dropouts and learned positions; queries and keys are rotated instead.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    mlp: int = field(default=0)
    kv_heads: int = field(default=0)
    gated: bool = False
    untied: bool = False
    plain: bool = False

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.sequence, self.vocabulary) < 1:
            raise ValueError(f"sizes of a model are at least 1: {self}")
        if self.width % self.heads:
            raise ValueError(f"heads divide the width (hidden), but {self.width} is no multiple of {self.heads}")
        if not self.mlp:
            object.__setattr__(self, "mlp", 4 * self.width)
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads of keys and values divide the heads, but {self.heads} is no multiple of {self.kv_heads}"
            )

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.width // self.heads * self.kv_heads

    @property
    def ups(self) -> int:
        """Matrices of the MLP that read its input."""
        return 2 if self.gated else 1

    @property
    def layer_parameters(self) -> int:
        weights = 2 * self.width * (self.width + self.kv_width) + (self.ups + 1) * self.width * self.mlp
        if self.plain:
            return weights + 2 * self.width
        return weights + 2 * (self.width + self.kv_width) + self.ups * self.mlp + 5 * self.width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def head_parameters(self) -> int:
        """Of a head's own weight."""
        return self.embedding_parameters if self.untied else 0

    @property
    def parameters(self) -> int:
        ends = self.embedding_parameters + self.head_parameters
        norm = self.width if self.plain else (self.sequence + 2) * self.width
        return self.layers * self.layer_parameters + ends + norm

    def flops(self, batch: int, recompute: bool = True) -> float:
        """Of a step: ``96 B s L d^2 (1 + s/6d + V/16Ld)`` with recomputation (SC'21, equation 3), 72 … without; of
        keys, values and MLP as wide as they are.
        """
        factor = 4 if recompute else 3
        matrices = 2 * self.width * (self.width + self.kv_width) + (self.ups + 1) * self.width * self.mlp
        layer = 2 * matrices + 4 * self.sequence * self.width
        return batch * self.sequence * (factor * self.layers * layer + 6.0 * self.vocabulary * self.width)


@dataclass(frozen=True, slots=True)
class Style:
    """How a layer is run. sequence_parallel: norms, residuals and dropouts on a share of the sequence each, between a
    reduce-scatter and an all-gather in place of every all-reduce (Korthikanti et al., arXiv 2205.05198).
    fused_attention: scores stay on the chip, those that the causal mask hides are left out, and its backward repeats
    them (Dao et al., arXiv 2205.14135).
    beside: an input's gradient is summed over the tensor axis beside the gradient of the weight that it was read with.
    tensor_overlap: so is all that is gathered and scattered over the tensor axis, piece by piece beside the products
    that read or make it (Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959).
    """

    sequence_parallel: bool = False
    fused_attention: bool = False
    beside: bool = False
    tensor_overlap: bool = False


MEGATRON = Style()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the model that a stage boundary may follow: seconds of one microbatch, without collectives.

    core_s: of the forward, scores to weighted values: what selective recomputation repeats. parameters: numbers that
    one rank holds. reduces: all-reduces over the tensor axis of a forward, each a gathering before and a scattering
    after; a backward has as many. read_s, made_s: of the forward, the product that reads what is gathered and the one
    whose result is scattered; made_back_s, weight_s: of the backward, the input's gradient of the latter and the
    weight's of the former.
    """

    forward_s: float
    backward_s: float
    core_s: float = 0.0
    parameters: float = 0.0
    reduces: int = 0
    read_s: float = 0.0
    made_s: float = 0.0
    made_back_s: float = 0.0
    weight_s: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Part)))


def _part(
    device: Device,
    products: tuple[Product, ...],
    bytes_forward: float,
    bytes_backward: float,
    kernels: int,
    parameters: float = 0.0,
    reduces: int = 0,
    pieces: int = 1,
) -> Part:
    """Prices with fp16 products; a kernel that only moves memory is launched once, backward twice.

    products: the first reads what the tensor axis brings, the last makes what it sums. pieces: of rows, in which these
    two are computed, and the input's gradient of the latter.
    """
    forward = copy_seconds(device, bytes_forward) + kernels * device.launch_s
    backward = copy_seconds(device, bytes_backward) + 2 * kernels * device.launch_s
    if not products:
        return Part(forward, backward, 0.0, parameters, reduces)
    first, last = products[0], products[-1]
    read, made, made_back = (_in_pieces(device, product, pieces) for product in (first, last, last.backward[0]))
    weight = _seconds(device, first.backward[1])
    forward += made if first is last else read + made
    backward += made_back + weight
    if first is not last:
        backward += _seconds(device, first.backward[0]) + _seconds(device, last.backward[1])
    for product in products[1:-1]:
        forward += _seconds(device, product)
        backward += sum(_seconds(device, gradient) for gradient in product.backward)
    if not reduces:
        read = made = made_back = weight = 0.0
    return Part(forward, backward, 0.0, parameters, reduces, read, made, made_back, weight)


def _in_pieces(device: Device, product: Product, pieces: int) -> float:
    return pieces * _seconds(device, replace(product, m=max(1, product.m // pieces)))


def _seconds(device: Device, product: Product) -> float:
    return op_seconds(device, 0.0, product.num_bytes(_HALF), "float16", products=(product,))


def layer_products(model: Gpt, samples: int, tensor: int, context: int = 1) -> tuple[Product, ...]:
    """A layer's forward matrix products on one rank: q k v, scores, weighted values, output; up, down.

    tensor, context: ranks that share the layer's width, and each sequence.
    """
    rows, heads = model.sequence // context, max(1, model.heads // tensor)
    tokens, width, size = samples * rows, model.width, model.width // model.heads
    inner, mlp = heads * size, max(1, model.mlp // tensor)
    return (
        Product.contiguous(tokens, inner + 2 * max(1, model.kv_heads // tensor) * size, width),
        Product.contiguous(rows, model.sequence, size, samples * heads),
        Product.contiguous(rows, size, model.sequence, samples * heads),
        Product.contiguous(tokens, width, inner),
        Product.contiguous(tokens, model.ups * mlp, width),
        Product.contiguous(tokens, width, mlp),
    )


@dataclass(frozen=True, slots=True)
class _Chains:
    """Bytes of an element in pointwise chains, forward and back: see the module.

    keys: of keys and values together, by elements of the keys. bias_back: of the MLP's, beside the product's.
    vectors: numbers for each of the width's that attention and MLP hold beside their matrices. ends: of what the
    embedding brings.
    """

    residual: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    bias_back: int
    vectors: tuple[int, int]
    ends: tuple[int, int]


_BIASED = _Chains(residual=(7, 7), queries=(8, 6), keys=(8, 4), bias_back=2, vectors=(6, 4), ends=(11, 9))
_PLAIN = _Chains(residual=(6, 0), queries=(4, 4), keys=(4, 4), bias_back=0, vectors=(1, 1), ends=(4, 4))


def layer_parts(
    model: Gpt, device: Device, samples: int, tensor: int, style: Style = MEGATRON, context: int = 1
) -> tuple[Part, Part]:
    """A layer's attention and MLP on one of ``tensor`` x ``context`` ranks for ``samples`` samples."""
    products = layer_products(model, samples, tensor, context)
    tokens = samples * model.sequence / context
    inner, keys = tokens * model.width / tensor, tokens * model.kv_width / min(tensor, model.kv_heads)
    outside = inner if style.sequence_parallel else tokens * model.width
    up = tokens * model.mlp / tensor
    reduces = 1 if tensor > 1 else 0
    pieces = tensor if style.tensor_overlap else 1
    chains = _PLAIN if model.plain else _BIASED
    core = _core(model, device, samples, tensor, style, context)
    attention = _part(
        device,
        (products[0], products[3]),
        (4 + chains.residual[0]) * outside + chains.queries[0] * inner + chains.keys[0] * keys,
        (10 + chains.residual[1]) * outside + chains.queries[1] * inner + chains.keys[1] * keys,
        4,
        2 * model.width * (model.width + model.kv_width) / tensor + chains.vectors[0] * model.width,
        reduces,
        pieces,
    )
    mlp = _part(
        device,
        products[4:],
        (4 + chains.residual[0]) * outside + 2 * (model.ups + 1) * up,
        (10 + chains.residual[1]) * outside + (2 * (2 * model.ups + 1) + chains.bias_back) * up,
        3,
        (model.ups + 1) * model.width * model.mlp / tensor + chains.vectors[1] * model.width,
        reduces,
        pieces,
    )
    return attention + core, mlp


def _core(model: Gpt, device: Device, samples: int, tensor: int, style: Style, context: int) -> Part:
    """Scores, softmax, dropout, weighted values."""
    products = layer_products(model, samples, tensor, context)[1:3]
    rows = model.sequence / context
    if style.fused_attention:
        slower = slower_attention(model.width // model.heads, model.sequence, causal=True)
        products = tuple(replace(product, fused=True, slower=slower) for product in products)
        moved = _HALF * samples * rows * model.width / tensor
        gradients = (products[0], *(gradient for product in products for gradient in product.backward))
        forward = op_seconds(device, 0.0, 4 * moved, "float16", products=products)
        return Part(forward, op_seconds(device, 0.0, 8 * moved, "float16", products=gradients), forward)
    scores = samples * model.heads / tensor * rows * model.sequence
    found = _part(device, products, (4 + 5) * scores, (6 + 5) * scores, 2)
    return Part(found.forward_s, found.backward_s, found.forward_s)


def embedding_part(model: Gpt, device: Device, samples: int, tensor: int, context: int = 1) -> Part:
    """Lookup, position, dropout; the gradient of a tied table is added up by the head."""
    whole = samples * model.sequence / context * model.width
    table = model.embedding_parameters / tensor
    forward, backward = (_PLAIN if model.plain else _BIASED).ends
    return _part(device, (), forward * whole, backward * whole + 2 * _HALF * table, 3, table, 1 if tensor > 1 else 0)


def head_part(model: Gpt, device: Device, samples: int, tensor: int, context: int = 1) -> Part:
    """Norm, logits, cross entropy in float32: converted, maximum, exponential, sum, gradient, converted back."""
    tokens = samples * (model.sequence // context)
    whole, logits = tokens * model.width, tokens * model.vocabulary / tensor
    products = (Product.contiguous(tokens, max(1, model.vocabulary // tensor), model.width),)
    forward, backward = 4 * whole + (6 + 4 + 8 + 8 + 4) * logits, 10 * whole + (8 + 6) * logits
    return _part(device, products, forward, backward, 6, model.head_parameters / tensor, 1 if tensor > 1 else 0)

"""What one device computes and sends for a GPT layer as Megatron-LM runs it: kernels, bytes, collectives.

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

Matrix products read and write their operands besides.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopart.cost.compute import Product, copy_seconds, op_seconds, slower_attention
from autopart.cost.devices import Device

_HALF = 2


@dataclass(frozen=True, slots=True)
class Gpt:
    """Sizes of a GPT model with a tied head; ``mlp`` is its MLP's width (default 4 width)."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int
    mlp: int = field(default=0)

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.sequence, self.vocabulary) < 1 or self.width % self.heads:
            raise ValueError(f"sizes are at least 1 and heads divide the width: {self}")
        if not self.mlp:
            object.__setattr__(self, "mlp", 4 * self.width)

    @property
    def layer_parameters(self) -> int:
        return 4 * self.width**2 + 4 * self.width + 2 * self.width * self.mlp + self.mlp + 5 * self.width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + (self.vocabulary + self.sequence + 2) * self.width

    def flops(self, batch: int, recompute: bool = True) -> float:
        """Of a step: ``96 B s L d^2 (1 + s/6d + V/16Ld)`` with recomputation (SC'21, equation 3), 72 … without."""
        factor = 4 if recompute else 3
        layer = 8 * self.width**2 + 4 * self.width * self.mlp + 4 * self.sequence * self.width
        return batch * self.sequence * (factor * self.layers * layer + 6.0 * self.vocabulary * self.width)


@dataclass(frozen=True, slots=True)
class Style:
    """How a layer is run. sequence_parallel: norms, residuals and dropouts on a share of the sequence each, between a
    reduce-scatter and an all-gather in place of every all-reduce (Korthikanti et al., arXiv 2205.05198).
    fused_attention: scores stay on the chip, those that the causal mask hides are left out, and its backward repeats
    them (Dao et al., arXiv 2205.14135).
    beside: an input's gradient is summed over the tensor axis beside the gradient of the weight that it was read with.
    """

    sequence_parallel: bool = False
    fused_attention: bool = False
    beside: bool = False


MEGATRON = Style()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the model that a stage boundary may follow: seconds of one microbatch, without collectives.

    core_s: of the forward, scores to weighted values: what selective recomputation repeats. parameters: numbers that
    one rank holds. reduces: all-reduces over the tensor axis of a forward; a backward has as many. weight_s: of the
    backward, the gradient of the weight that reads what these bring.
    """

    forward_s: float
    backward_s: float
    core_s: float = 0.0
    parameters: float = 0.0
    reduces: int = 0
    weight_s: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(
            self.forward_s + other.forward_s,
            self.backward_s + other.backward_s,
            self.core_s + other.core_s,
            self.parameters + other.parameters,
            self.reduces + other.reduces,
            self.weight_s + other.weight_s,
        )


def _part(
    device: Device,
    products: tuple[Product, ...],
    bytes_forward: float,
    bytes_backward: float,
    kernels: int,
    parameters: float = 0.0,
    reduces: int = 0,
) -> Part:
    """Prices with fp16 products; a kernel that only moves memory is launched once, backward twice.

    products: the first reads what the tensor axis brings.
    """
    forward = copy_seconds(device, bytes_forward) + kernels * device.launch_s
    backward = copy_seconds(device, bytes_backward) + 2 * kernels * device.launch_s
    for product in products:
        forward += _seconds(device, product)
        backward += sum(_seconds(device, gradient) for gradient in product.backward)
    weight = _seconds(device, products[0].backward[1]) if products and reduces else 0.0
    return Part(forward, backward, 0.0, parameters, reduces, weight)


def _seconds(device: Device, product: Product) -> float:
    return op_seconds(device, 0.0, product.num_bytes(_HALF), "float16", products=(product,))


def layer_products(model: Gpt, samples: int, tensor: int) -> tuple[Product, ...]:
    """A layer's forward matrix products on one rank: q k v, scores, weighted values, output; up, down."""
    tokens, heads = samples * model.sequence, max(1, model.heads // tensor)
    width, size = model.width, model.width // model.heads
    inner, mlp = heads * size, max(1, model.mlp // tensor)
    return (
        Product(tokens, 3 * inner, width),
        Product(model.sequence, model.sequence, size, samples * heads),
        Product(model.sequence, size, model.sequence, samples * heads),
        Product(tokens, width, inner),
        Product(tokens, mlp, width),
        Product(tokens, width, mlp),
    )


def layer_parts(model: Gpt, device: Device, samples: int, tensor: int, style: Style = MEGATRON) -> tuple[Part, Part]:
    """A layer's attention and MLP on one of ``tensor`` ranks for ``samples`` samples."""
    products = layer_products(model, samples, tensor)
    tokens = samples * model.sequence
    inner = tokens * model.width / tensor
    outside = inner if style.sequence_parallel else float(tokens * model.width)
    up = tokens * model.mlp / tensor
    reduces = 1 if tensor > 1 else 0
    core = _core(model, device, samples, tensor, style)
    attention = _part(
        device,
        (products[0], products[3]),
        (4 + 7) * outside + (4 * 3 + 4) * inner,
        (10 + 7) * outside + (2 * 3 + 4) * inner,
        4,
        4 * model.width**2 / tensor + 6 * model.width,
        reduces,
    )
    mlp = _part(
        device,
        products[4:],
        (4 + 7) * outside + 4 * up,
        (10 + 7) * outside + 8 * up,
        3,
        2 * model.width * model.mlp / tensor + 4 * model.width,
        reduces,
    )
    return attention + core, mlp


def _core(model: Gpt, device: Device, samples: int, tensor: int, style: Style) -> Part:
    """Scores, softmax, dropout, weighted values."""
    products = layer_products(model, samples, tensor)[1:3]
    if style.fused_attention:
        slower = slower_attention(model.width // model.heads, model.sequence, causal=True)
        products = tuple(replace(product, fused=True, slower=slower) for product in products)
        moved = _HALF * samples * model.sequence * model.width / tensor
        gradients = (products[0], *(gradient for product in products for gradient in product.backward))
        forward = op_seconds(device, 0.0, 4 * moved, "float16", products=products)
        return Part(forward, op_seconds(device, 0.0, 8 * moved, "float16", products=gradients), forward)
    scores = samples * model.heads / tensor * model.sequence**2
    found = _part(device, products, (4 + 5) * scores, (6 + 5) * scores, 2)
    return Part(found.forward_s, found.backward_s, found.forward_s)


def embedding_part(model: Gpt, device: Device, samples: int, tensor: int) -> Part:
    """Lookup, position, dropout; the gradient of a tied table is added up by the head."""
    whole = samples * model.sequence * model.width
    table = model.embedding_parameters / tensor
    return _part(device, (), 11 * whole, 9 * whole + 2 * _HALF * table, 3, table, 1 if tensor > 1 else 0)


def head_part(model: Gpt, device: Device, samples: int, tensor: int) -> Part:
    """Norm, logits, cross entropy in float32: converted, maximum, exponential, sum, gradient, converted back."""
    tokens = samples * model.sequence
    whole, logits = tokens * model.width, tokens * model.vocabulary / tensor
    products = (Product(tokens, max(1, model.vocabulary // tensor), model.width),)
    forward, backward = 4 * whole + (6 + 4 + 8 + 8 + 4) * logits, 10 * whole + (8 + 6) * logits
    return _part(device, products, forward, backward, 6, 0.0, 1 if tensor > 1 else 0)

"""Seconds that one device takes for one op: the roofline model, with tiles for matrix products.

An op is bound by arithmetic or by memory traffic, whichever takes longer (Williams, Waterman, Patterson: Roofline,
CACM 52(4), 2009), and every kernel takes a little by itself::

    seconds = max(arithmetic, bytes / (bandwidth * memory)) + launches * launch_s
    arithmetic = flops / (peak * contraction)                          where shapes do not matter or are not known

A GPU computes a matrix product of ``groups`` times ``m x k`` by ``k x n`` in tiles of the output, one to a
multiprocessor at a time. What that adds to the roofline (NVIDIA, Matrix Multiplication Background User's Guide)::

    tiles      = groups ceil(m / tm) ceil(n / tn) parts              tile quantisation: a partial tile costs a whole
    waves      = ceil(tiles / processors)                            wave quantisation: a partial wave costs a whole
    wave       = 2 tm tn ceil(k / parts) processors / (peak contraction rate(tm, tn)) + written
    written    = tm tn itemsize processors / bandwidth
    arithmetic = waves wave
    rate       = (1 + OPERAND (1/256 + 1/128)) / (1 + OPERAND (1/tm + 1/tn))

``written`` is the small-shape floor: a tile writes its sums last, through its multiprocessor's share of the memory's
bandwidth, while it computes nothing. That is as long as some 100 steps along k on V100 and A100, 210 on H100, which
computes more per byte. ``rate``: smaller tiles load more operands per FLOP. ``parts`` (split-k) divides
k among tiles and pays for adding up partial sums. As cuBLAS does by its heuristics, the best tile and split are taken.
Nothing of this falls when a size grows.

A CPU computes functions of elements, and random numbers, beside its products (``vector``, counted by
:mod:`autopart.passes.arithmetic`), which GPUs hide behind their bytes::

    seconds = max(arithmetic + vector, bytes / (bandwidth * memory)) + launches * launch_s + mapped * mapped_s
    vector  = functions * function_s + drawn * random_s
    mapped  = bytes of new tensors of LARGE_BYTES or more, whose pages are mapped, and cleared, one by one

Fused attention keeps its scores on the chip: it reads query, key and value and writes the result (what ``num_bytes``
counts), and reaches a share of the peak of its own. Its thread blocks take ATTENTION_ROWS rows of the sequence of one
head of one sample each (Dao, FlashAttention-2, arXiv 2307.08691, section 3.2), so that short sequences and few heads
leave multiprocessors idle::

    blocks     = groups ceil(sequence / ATTENTION_ROWS)
    arithmetic = slower flops / (peak attention) * padded rows / rows * ceil(blocks / processors) processors / blocks
    slower     = (size + 36) / size * 128 / (128 + 36)      the softmax takes as long as 36 columns of a head
                 * 1.25 (rows + 128) / (2 rows)             where causal: blocks beyond the diagonal are left out, and
                                                            multiprocessors have unequal shares of the rest; with the
                                                            last n rows for queries (2 rows - n + 128) / (2 rows)
                 * 1.65                                     where a mask is read
                 * 1.45                                     with dropout, whose random numbers are drawn anew backward

(measured on H100 with PyTorch 2.11, benchmarks/measured.) A matrix product whose rows do not start at multiples of 16
bytes, such as one with a vocabulary of 50,257, has kernels of its own, which load element by element (NVIDIA, Matrix
Multiplication Background User's Guide, Tensor Core requirements): a share ``unaligned`` of the rate.

A convolution in groups narrower than any tile, of a single channel in a depthwise one, has no matrix product to
compute: its kernels multiply on a GPU's float32 units, or a CPU's vectors, and load an operand for every few
multiplications, as a tile of so few columns does (:func:`narrow_rate`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd

from autopart.cost.devices import Device

OPERAND = 24.0
"""Weight of loading one operand element against one multiply-add per output row or column of the tile."""
ATTENTION_ROWS = 128
"""Rows of the sequence that one thread block of fused attention takes."""
ATTENTION_KEYS = 512
"""Keys of a block of a CPU's fused attention, which leaves out what lies beyond the diagonal in whole blocks (measured:
1,024 tokens take 0.76 of the time, 512 no less)."""
_SOFTMAX = 36.0
_CAUSAL, _MASKED, _DROPPED = 1.25, 1.65, 1.45
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32), (32, 32))
_LARGEST = 1 / 256 + 1 / 128
_SPLITS = (1, 2, 3, 4, 6, 8, 16)
_LEAST_SPLIT_K = 256
_NARROW, _NARROW_ROWS = min(map(min, _TILES)), 128
"""Channels of a group below which a convolution is none of matrix products, and rows of what it computes at once."""
_SUM_BYTES = 4
_ROW_BYTES = 16
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}  # float32 otherwise


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the datasheet's peaks that are reached; above 0, at most 1. Replaces those of device and link.

    contraction: large matrix products in cuBLAS reach 60 to 75 percent of the dense tensor-core peak under a GPU's
    power limit, and MKL about as much of an AVX2 core's.
    memory: STREAM-like kernels reach about 80 percent of HBM's and DDR's peak.
    network: payload over line rate after protocol headers and the ends of a ring's pipeline.
    """

    contraction: float = 0.65
    memory: float = 0.8
    network: float = 0.8

    def __post_init__(self) -> None:
        for share in (self.contraction, self.memory, self.network):
            if not 0 < share <= 1:
                raise ValueError(f"an efficiency is above 0 and at most 1: {self}")


@dataclass(frozen=True, slots=True)
class Product:
    """``groups`` matrix products of ``m x k`` by ``k x n``.

    fused: inside a kernel of fused attention; back: of its backward. row: what the lengths of all rows in memory, of
    both factors and of the result, are multiples of, in elements (0: of as many as is good). slower: times as long as
    its FLOPs take where it is fused, for what the kernel does besides or leaves out.
    """

    m: int
    n: int
    k: int
    groups: int = 1
    fused: bool = False
    row: int = 0
    slower: float = 1.0
    back: bool = False

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k, self.groups) < 1 or self.row < 0 or self.slower <= 0:
            raise ValueError(f"a matrix product's sizes are at least 1: {self}")

    @staticmethod
    def contiguous(m: int, n: int, k: int, groups: int = 1) -> Product:
        """Of tensors that lie in memory row by row, as they are multiplied."""
        return Product(m, n, k, groups, row=gcd(n, k))

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k

    def is_aligned(self, dtype: str) -> bool:
        """Whether all rows start at multiples of 16 bytes, or the numbers are so wide that it does not matter."""
        return _ITEM_BYTES.get(dtype) != 2 or self.row * 2 % _ROW_BYTES == 0

    def num_bytes(self, itemsize: int = 2) -> float:
        """Both factors read and the result written, once."""
        return float(itemsize * self.groups * (self.m * self.k + self.k * self.n + self.m * self.n))

    @property
    def backward(self) -> tuple[Product, Product]:
        """The factors' gradients: ``m x n`` by ``n x k`` and ``k x m`` by ``m x n``."""
        return replace(self, n=self.k, k=self.n, back=self.fused), replace(self, m=self.k, k=self.m, back=self.fused)


def op_seconds(
    device: Device,
    flops: float,
    num_bytes: float,
    dtype: str = "float32",
    launches: int = 1,
    efficiency: Efficiency | None = None,
    products: tuple[Product, ...] = (),
    vector_s: float = 0.0,
    mapped: float = 0.0,
) -> float:
    """Seconds of an op with ``flops`` in ``dtype`` that reads and writes ``num_bytes``; 0 for a view (neither).

    products: what the FLOPs are, where they are matrix products of known shapes; ``flops`` then counts nothing.
    vector_s: of what it computes besides (:func:`vector_seconds`). mapped: bytes of new large tensors.
    """
    if products:
        arithmetic = sum(product_seconds(device, product, dtype, efficiency) for product in products)
    elif flops <= 0 and num_bytes <= 0:
        return 0.0
    else:
        arithmetic = flops / _product_rate(device, dtype, efficiency)
    longest = max(arithmetic + vector_s, copy_seconds(device, num_bytes, efficiency))
    return longest + launches * device.launch_s + mapped * device.mapped_s


def vector_seconds(device: Device, functions: float, drawn: float) -> float:
    """Seconds of as many exponentials, or what takes as long, and of as many random numbers."""
    return functions * device.function_s + drawn * device.random_s


def _product_rate(device: Device, dtype: str, efficiency: Efficiency | None) -> float:
    return device.peak(dtype) * efficiency.contraction if efficiency else device.product_rate(dtype)


def copy_seconds(device: Device, num_bytes: float, efficiency: Efficiency | None = None) -> float:
    """Seconds of moving ``num_bytes`` (read plus written) through the device's memory."""
    return num_bytes / (device.memory_bandwidth * (efficiency.memory if efficiency else device.memory))


def product_seconds(device: Device, product: Product, dtype: str, efficiency: Efficiency | None = None) -> float:
    """Seconds of a matrix product's arithmetic, without traffic and launch."""
    if product.fused:
        return _fused_seconds(product, device.processors, device.attention_rate(dtype, product.back))
    rate = _product_rate(device, dtype, efficiency)
    if not product.is_aligned(dtype):
        rate *= device.unaligned
    if not device.processors:
        return product.flops / rate
    memory = device.memory_bandwidth * (efficiency.memory if efficiency else device.memory)
    written_s = _ITEM_BYTES.get(dtype, 4) * device.processors / device.memory_bandwidth
    return _tiled_seconds(product, device.processors, rate, memory, written_s)


def narrow_rate(device: Device, dtype: str, channels: int) -> float:
    """FLOP/s of a convolution whose groups have so many channels, of input or output whichever are fewer."""
    rate = device.product_rate(dtype)
    if channels >= _NARROW:
        return rate
    share = (1 + OPERAND * _LARGEST) / (1 + OPERAND * (1 / _NARROW_ROWS + 1 / channels))
    # Units that no tensor core makes hot reach their peak; those of a CPU are what its products are computed on.
    return min(rate, share * (rate if device.kind == "cpu" else device.peak("float32")))


def causal_share(rows: int, queries: int = 0) -> float:
    """The part of its FLOPs that a CPU's fused attention computes where it is causal.

    rows: of the sequence; queries: as many of its last, 0: all.
    """
    return min(1.0, (2 * rows - min(queries or rows, rows) + ATTENTION_KEYS) / (2 * rows))


def slower_attention(
    size: int, rows: int, *, queries: int = 0, causal: bool = False, masked: bool = False, dropout: bool = False
) -> float:
    """How much longer fused attention takes than one with heads of 128 that masks nothing takes for as many FLOPs.

    size: of a head. rows: of the sequence; queries: as many of its last, 0: all. See the module.
    """
    found = (size + _SOFTMAX) / size * 128 / (128 + _SOFTMAX)
    if causal:
        found *= _CAUSAL * min(1.0, (2 * rows - min(queries or rows, rows) + ATTENTION_ROWS) / (2 * rows))
    return found * (_MASKED if masked else 1.0) * (_DROPPED if dropout else 1.0)


def _fused_seconds(product: Product, processors: int, rate: float) -> float:
    if not processors:
        return product.flops / rate
    # Of a product's three sizes one is the head's, the others are sequences.
    sequence = max(product.m, product.n, product.k)
    blocks = ceil(sequence / ATTENTION_ROWS)
    padding = blocks * ATTENTION_ROWS / sequence
    waves = ceil(product.groups * blocks / processors)
    return product.flops / rate * product.slower * padding * waves * processors / (product.groups * blocks)


@lru_cache(maxsize=65536)
def _tiled_seconds(product: Product, processors: int, rate: float, memory: float, written_s: float) -> float:
    """written_s: until an element of a tile is written."""
    best = float("inf")
    sums = _SUM_BYTES * product.groups * product.m * product.n / memory
    for rows, columns in _TILES:
        slowdown = (1 + OPERAND * (1 / rows + 1 / columns)) / (1 + OPERAND * _LARGEST)
        tiles = product.groups * ceil(product.m / rows) * ceil(product.n / columns)
        per_step = 2 * rows * columns * processors * slowdown / rate
        for parts in _SPLITS:
            share = ceil(product.k / parts)
            steps = share if parts == 1 else max(share, _LEAST_SPLIT_K)
            waves, wave = ceil(tiles * parts / processors), steps * per_step + rows * columns * written_s
            best = min(best, waves * wave + (2 * parts * sums if parts > 1 else 0.0))
    return best

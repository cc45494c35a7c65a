"""Measures this machine: matrix products, memory-bound ops, attention, tiny ops, the host, and collectives.

Every rank of a job measures the same list, each sample between barriers, so that ranks that share cores, memory or a
network are measured under the load that training gives them. A sample's seconds are the mean over ranks of each
rank's median over a few spans, and a span is long enough for the operating system's turns to average out.

A GPU's kernels are measured by its own clock, behind others that keep it busy until the host has started them all: what
the host takes is a sample by itself, of a small model's step. On a CPU such a step says what an op takes in training,
in Python, dispatcher and autograd, whatever its size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopart.cost.clock import Clock, in_job, ranks
from autopart.cost.communication import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND
from autopart.cost.compute import Product, slower_attention
from autopart.cost.samples import ATTENTION, HOST, LAUNCH, PRODUCT, STREAM, Sample
from autopart.cost.small_layer import SmallLayer
from autopart.passes.arithmetic import FUNCTIONS
from autopart.runtime import collectives
from autopart.runtime.mesh import Axis

_HELD_EVERY = 3
"""Every third sample of a kind is kept aside from the fit."""
_TOKENS = (32, 128, 512, 2048, 8192)
_WIDTHS = (128, 384, 768, 1536, 4096)
_ELEMENTS = {
    "cpu": tuple(2**power for power in (15, 17, 19, 21, 22)),
    "cuda": tuple(2**power for power in (22, 24, 25, 26, 27)),
}
_COLD, _LEAST_COLD, _COLD_ON_GPU = 2**26, 2**24, 2**28
"""Numbers that memory-bound ops go through before they come to the first again: those of all ranks on CPUs, which share
caches, and of each; and of each GPU."""
_LARGE_ELEMENTS = tuple(count * 2**22 for count in (3, 4, 6))
"""Of tensors of 48 to 96 MiB, which a CPU has mapped anew."""
_LAYERS = (6, 12, 18, 24)
"""Of the small transformers by which the host is measured."""
_ODD = 1001
"""A number of columns whose rows are not aligned."""
_COLLECTIVE_BYTES = tuple(2**power for power in (12, 15, 18, 20, 22, 23, 24))
_HEADS = ((4, 8, 128, 64), (1, 12, 512, 64), (2, 8, 256, 32), (1, 8, 1024, 64), (2, 4, 512, 128), (8, 4, 64, 32))


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. span_s: seconds of one span. products: matrix products by type. flops: of the largest."""

    span_s: float
    products: int
    flops: float
    dtypes: tuple[str, ...]
    sizes: int


def effort_for(kind: str, quick: bool) -> Effort:
    """A minute or two on an idle machine; quick: a quarter of that, in the usual types alone."""
    if kind == "cuda":
        return Effort(
            0.01, 12 if quick else 30, 2e11, ("bfloat16", "float32") if quick else _CUDA_DTYPES, 3 if quick else 5
        )
    return Effort(
        0.02 if quick else 0.06, 12 if quick else 27, 3e9, ("float32",) if quick else _CPU_DTYPES, 3 if quick else 5
    )


_CUDA_DTYPES = ("bfloat16", "float16", "float32", "float64")
_CPU_DTYPES = ("float32", "bfloat16", "float64")


def measure(device: torch.device, effort: Effort, progress: Callable[[str], None] = lambda _: None) -> list[Sample]:
    """All samples of this rank's device, and of its group where torch.distributed is initialized with several ranks."""
    clock = Clock(device, effort.span_s)
    found: list[Sample] = []
    for what, samples in (
        ("matrix products", _products(clock, effort)),
        ("memory-bound ops", chain(_mapped(clock), _streams(clock, effort))),
        ("tiny ops", _launches(clock)),
        ("the host", _hosts(clock)),
        ("attention", _attention(clock, effort)),
        ("collectives", _collectives(clock, effort)),
    ):
        progress(what)
        found += samples
    return hold_aside(_averaged(found))


def hold_aside(samples: Sequence[Sample]) -> list[Sample]:
    """Every third sample of each kind and type is marked as kept aside; kinds with fewer than three keep none."""
    seen: dict[tuple[str, str], int] = {}
    marked = []
    for sample in samples:
        key = (sample.kind, sample.dtype)
        seen[key] = seen.get(key, 0) + 1
        marked.append(replace(sample, held=seen[key] % _HELD_EVERY == 0))
    return marked


def _averaged(samples: list[Sample]) -> list[Sample]:
    """Each sample with its mean over the ranks."""
    if not in_job():
        return samples
    seconds = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64)
    if dist.get_backend() == "nccl":
        seconds = seconds.cuda()
    dist.all_reduce(seconds)
    means = (seconds / dist.get_world_size()).tolist()
    return [replace(sample, seconds=mean) for sample, mean in zip(samples, means, strict=True)]


def product_shapes(most_flops: float, count: int) -> list[Product]:
    """Products of transformers' layers, heads' batched ones among them, thinned out to about ``count`` by FLOPs."""
    found = set()
    for tokens in _TOKENS:
        for width in _WIDTHS:
            found |= {
                Product(tokens, 3 * width, width),
                Product(tokens, width, width),
                Product(tokens, width, 4 * width),
            }
            found.add(Product(tokens, 4 * width, width))
        found.add(Product(min(tokens, 512), min(tokens, 512), 64, 12))
    fitting = sorted(
        (item for item in found if item.flops <= most_flops), key=lambda item: (item.flops, item.m, item.n)
    )
    return fitting[:: max(1, len(fitting) // count)]


def odd_shapes() -> list[Product]:
    """Products whose rows are not aligned, as with a vocabulary of an odd number of words."""
    forward = [Product(tokens, _ODD, width, row=1) for tokens in (2048, 8192) for width in (768, 2048)]
    return [product for shape in forward for product in (shape, *shape.backward)]


def _products(clock: Clock, effort: Effort) -> Iterator[Sample]:
    for name in effort.dtypes:
        shapes = list(enumerate(product_shapes(effort.flops, effort.products)))
        if clock.device.type == "cuda" and getattr(torch, name).itemsize == 2:
            shapes += enumerate(odd_shapes())
        for index, shape in shapes:
            call, text = _product_call(shape, index, getattr(torch, name), clock.device)
            seconds = clock.kernel_seconds(call)
            moved = shape.num_bytes(getattr(torch, name).itemsize)
            yield Sample(PRODUCT, f"{name} {text}", seconds, name, (shape,), moved)


def _product_call(
    shape: Product, index: int, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Tensor], str]:
    """Forward's, input gradient's and weight gradient's layouts of the factors in turn."""

    def made(rows: int, columns: int) -> Tensor:
        return torch.randn(shape.groups, rows, columns, device=device).to(dtype).squeeze(0)

    left, right = made(shape.m, shape.k), made(shape.k, shape.n)
    if index % 3 == 0:
        right = made(shape.n, shape.k).transpose(-1, -2)
    elif index % 3 == 2:
        left = made(shape.k, shape.m).transpose(-1, -2)
    groups = f"{shape.groups} of " if shape.groups > 1 else ""
    return lambda: left @ right, f"{groups}{shape.m}x{shape.k} by {shape.k}x{shape.n}"


def _streams(clock: Clock, effort: Effort) -> Iterator[Sample]:
    """Each call reads and writes other memory than those before, as in training, of which no cache has much."""
    name, kind = effort.dtypes[0], clock.device.type
    cold = _COLD_ON_GPU if kind == "cuda" else max(_LEAST_COLD, _COLD // ranks())
    numbers = torch.randn(cold, device=clock.device).to(getattr(torch, name))
    for elements in _ELEMENTS[kind][: effort.sizes]:
        tensors = numbers.view(-1, elements // 512, 512).unbind(0)
        ops: list[tuple[str, int, Callable[[Tensor, Tensor], Tensor]]] = [
            ("add", 3, torch.add),
            ("copy", 2, lambda x, _: x.clone()),
            ("gelu_tanh", 2, lambda x, _: F.gelu(x, approximate="tanh")),
            ("layer_norm", 4 if kind == "cuda" else 2, lambda x, _: F.layer_norm(x, (512,))),  # see passes.traffic
            ("softmax", 2, lambda x, _: F.softmax(x, -1)),
        ]
        if kind == "cpu":
            ops += [("dropout", 2, lambda x, _: F.dropout(x, 0.1)), ("mish", 2, lambda x, _: F.mish(x))]
        for op, count, function in ops:
            following, made = cycle(zip(tensors[1::2], tensors[::2], strict=True)), deque[Tensor](maxlen=len(tensors))

            def call(
                function: Callable[[Tensor, Tensor], Tensor] = function,
                following: Iterator[tuple[Tensor, Tensor]] = following,
                made: deque[Tensor] = made,
            ) -> None:
                made.append(function(*next(following)))

            yield Sample(
                *(STREAM, f"{op} of {elements} {name}", clock.kernel_seconds(call), name),
                num_bytes=float(count * elements * numbers.element_size()),
                functions=float(elements * FUNCTIONS.get(op, (0, 0))[0]) if kind == "cpu" else 0.0,
                drawn=float(elements) if op == "dropout" else 0.0,
            )


def _mapped(clock: Clock) -> Iterator[Sample]:
    """Copies into new memory that is large."""
    if clock.device.type != "cpu":
        return
    for elements in _LARGE_ELEMENTS:
        numbers = torch.zeros(elements)
        size = float(4 * elements)
        yield Sample(
            *(STREAM, f"new copy of {elements} float32", clock.kernel_seconds(numbers.clone)),
            num_bytes=2 * size,
            mapped=size,
        )


def _launches(clock: Clock) -> Iterator[Sample]:
    """Tiny ops as training runs them: with a gradient to record."""
    x = torch.randn(4, 16, device=clock.device, requires_grad=True)
    ops: tuple[tuple[str, Callable[[], Tensor]], ...] = (
        ("add", lambda: x + x),
        ("gelu", lambda: F.gelu(x, approximate="tanh")),
        ("softmax", lambda: F.softmax(x, -1)),
        ("layer_norm", lambda: F.layer_norm(x, (16,))),
        ("sum", lambda: x.sum()),
        ("mul", lambda: x * 2.0),
    )
    for op, call in ops:
        yield Sample(LAUNCH, f"{op} of 64", clock.kernel_seconds(call), num_bytes=float(8 * x.numel()))


def _hosts(clock: Clock) -> Iterator[Sample]:
    """Forward and backward of small transformers, which take the device next to nothing."""
    for layers in _LAYERS:
        model = nn.Sequential(*(SmallLayer() for _ in range(layers))).to(clock.device)
        x = torch.randn(1, 16, SmallLayer.WIDTH, device=clock.device, requires_grad=True)

        def call(model: nn.Module = model, x: Tensor = x) -> None:
            model(x).sum().backward()
            model.zero_grad()

        longer = Clock(clock.device, 20 * clock.span_s)
        yield Sample(HOST, f"step of {layers} layers", longer.seconds(call), launches=layers * SmallLayer.KERNELS)


def _attention(clock: Clock, effort: Effort) -> Iterator[Sample]:
    """Fused attention forward; and forward with backward, whose products repeat the scores once."""
    for name in effort.dtypes[:2]:
        dtype = getattr(torch, name)
        for batch, heads, rows, size in _HEADS[: effort.sizes + 1]:
            if clock.device.type == "cuda":
                batch, rows = 4 * batch, 2 * rows
            query, key, value = (
                torch.randn(batch, heads, rows, size, device=clock.device).to(dtype).requires_grad_() for _ in range(3)
            )
            gradient = torch.ones_like(query)
            moved = float(query.numel() * dtype.itemsize)
            for causal in (False, True) if clock.device.type == "cuda" else (False,):
                slower = slower_attention(size, rows, causal=causal)
                scores = Product(rows, rows, size, batch * heads, fused=True, slower=slower)
                values = Product(rows, size, rows, batch * heads, fused=True, slower=slower)

                def forward(
                    query: Tensor = query, key: Tensor = key, value: Tensor = value, causal: bool = causal
                ) -> Tensor:
                    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

                def both(
                    query: Tensor = query,
                    key: Tensor = key,
                    value: Tensor = value,
                    gradient: Tensor = gradient,
                    causal: bool = causal,
                ) -> tuple[Tensor, ...]:
                    result = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
                    return torch.autograd.grad(result, (query, key, value), gradient)

                text = f"{name} {batch}x{heads} heads, {rows}x{size}{', causal' if causal else ''}"
                there, back = FUNCTIONS["scaled_dot_product_attention"] if clock.device.type == "cpu" else (0, 0)
                number = float(batch * heads * rows * rows)
                seconds = clock.kernel_seconds(forward)
                yield Sample(*(ATTENTION, text, seconds, name, (scores, values), 4 * moved), functions=there * number)
                products = (scores, values, replace(scores, back=True), *scores.backward, *values.backward)
                seconds = clock.kernel_seconds(both)
                yield Sample(
                    *(ATTENTION, f"{text}, with backward", seconds, name, products, 12 * moved, 3),
                    functions=(there + back) * number,
                )


def _collectives(clock: Clock, effort: Effort) -> Iterator[Sample]:
    """Payloads as :mod:`autopart.cost.communication` counts them, by the calls that the runtime makes."""
    if not in_job():
        return
    size = dist.get_world_size()
    axis = Axis("all", size, dist.get_rank(), dist.group.WORLD)
    for payload in _COLLECTIVE_BYTES[: effort.sizes + 2]:
        rows = payload // 4 // (size * size) * size
        whole = torch.zeros(rows, size, device=clock.device)
        num_bytes = float(whole.numel() * whole.element_size())
        for kind, call in _calls(whole, axis):
            text = f"{kind} of {whole.numel() * 4} bytes, {size} ranks"
            yield Sample(kind, text, clock.seconds(call), num_bytes=num_bytes, parts=size)


def _calls(whole: Tensor, axis: Axis) -> Iterator[tuple[str, Callable[[], object]]]:
    """The runtime's own functions, with the copies that they make; a send goes around the ring of ranks."""
    share, received = whole[: len(whole) // axis.size].clone(), torch.empty_like(whole)
    yield ALL_REDUCE, lambda: collectives.all_reduce(whole, axis)
    yield ALL_GATHER, lambda: collectives.all_gather(share, axis, 0)
    yield REDUCE_SCATTER, lambda: collectives.reduce_scatter(whole, axis, 0)
    yield ALL_TO_ALL, lambda: collectives.all_to_all(whole, axis, 0, 1)
    yield SEND, lambda: _send_on(whole, received, axis)


def _send_on(sent: Tensor, received: Tensor, axis: Axis) -> None:
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]):
        work.wait()

"""The one-line notation of an op's factors, and the rule that it becomes for given shapes.

An op is described like an einsum: operands, ``->``, outputs; one term per dim, separated by spaces::

    linear      *b k, n k -> *b n
    softmax     *b ^n -> *b ^n
    split       *b (^c n) -> *b n, *b n, *b n

========  ==========================================================================================================
``n``     a dim that is the factor ``n``; the same name is the same index wherever it stands
``*b``    a run of dims ``b0 b1 …``, one run per operand; shorter runs align to the right, as broadcasting does
``(h d)`` a dim made of several factors, the first outermost
``^n``    frozen: the factor may not be sharded (also ``^*b``); one mark freezes it everywhere
``_``     a frozen dim that corresponds to no other
``1``     a broadcast dim of size 1; a named dim of size 1 becomes one where the same factor is larger elsewhere
========  ==========================================================================================================

A factor that no output has is summed over unless it is frozen: this is what turns its sharding into partial sums.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autopart.passes.sizes import ONE, Extent
from autopart.runtime.errors import AutopartError
from autopart.runtime.traffic import Operation

Dim = tuple[str, ...]
"""The factors of one tensor dim, outermost first; none for a broadcast dim of size 1."""
Dims = tuple[Dim, ...]
Extents = tuple[Extent | None, ...]
"""The sizes of a tensor's dims; None where a size is no multiple of the batch size."""


class RuleError(AutopartError):
    """A rule's text cannot be read, or does not fit the shapes it is applied to."""


@dataclass(frozen=True, slots=True)
class Message:
    """One collective inside a local form, per microbatch.

    operation, phase: as :class:`autopart.runtime.traffic.Traffic` counts it. What a rank puts in has ``element_bytes``
    for every index of ``factors``, which lack the form's own: ``("*b",)`` for a number per row. Of an all_to_all it has
    its share of them.
    elements: how many that are in the whole tensor; of a bound rule.
    beside: it goes on while the gradient of the op's weight is computed.
    """

    operation: Operation
    phase: Literal["forward", "backward"]
    factors: tuple[str, ...]
    element_bytes: int
    elements: Extent = ONE
    beside: bool = False

    def payload(self, parts: int, batch: int) -> int:
        """Bytes of the call as :class:`autopart.runtime.traffic.Traffic` counts them, on an axis of ``parts`` ranks."""
        whole = self.elements.at(batch) * self.element_bytes
        return {"all_gather": whole * parts, "all_to_all": whole // parts}.get(self.operation, whole)


@dataclass(frozen=True, slots=True)
class LocalForm:
    """How an op runs on a shard of one factor where the op itself does not: by a function that knows its place.

    function: of :mod:`autopart.runtime.local_forms`; takes the op's own arguments (those that are no tensors by name)
        and the axis, by the name ``role``. whole: it returns the whole result (R), having exchanged what that needs;
        else what lacks the factor is a partial sum. messages: what it exchanges on this axis.
    several: it takes several axes as one (:class:`autopart.runtime.mesh.JoinedAxis`), each sharding what the others
        leave of the factor; it then exchanges its messages along one after the other.
    role: ``axis``, or in a form that spans two axes ``rows`` and ``columns`` (:mod:`autopart.passes.rules.joint`).
    """

    function: str
    whole: bool = False
    messages: tuple[Message, ...] = ()
    several: bool = False
    role: str = "axis"


@dataclass(frozen=True, slots=True)
class Panels:
    """How a product of two operands is computed panel by panel on two axes (:mod:`autopart.runtime.local_forms.summa`).

    function: of :mod:`autopart.runtime.local_forms`. left, right: the operands; the right one is a matrix of two
    factors, one of them shared with the left one and summed over. Others are added to the product.
    """

    function: str
    left: int = 0
    right: int = 1


@dataclass(frozen=True, slots=True)
class Annotation:
    """What a table or a user says about an op, before shapes are known.

    text: the factors, see the module.
    linear: groups of operands (by index) in which the op is jointly linear while the others are held; partial sums
        in a group's operands become a partial sum of every output.
    affine: operands that are added to the result, so that they must be partial sums where the result becomes one.
    products: the factors of each multiplication of arrays, for counting FLOPs: ``("*b n k",)`` for linear.
    sizes: factors whose size does not follow from the shapes.
    random: two runs differ (random numbers, uninitialised memory), and a sharded run from the whole.
    forms: local forms by factor. Such a factor is sharded in one block, never over the batch, and only by its form; by
        one that takes several axes, in as many blocks as the other axes make of it.
    panels: its form on two axes together, if it has one.
    """

    text: str
    linear: tuple[tuple[int, ...], ...] = ()
    affine: tuple[int, ...] = ()
    products: tuple[str, ...] = ()
    sizes: Mapping[str, Extent] = field(default_factory=dict, hash=False)
    random: bool = False
    forms: Mapping[str, LocalForm] = field(default_factory=dict, hash=False)
    panels: Panels | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """An annotation bound to the shapes of one op.

    inputs, outputs: factors of every dim, aligned with ``passes.graph.inputs`` and ``outputs`` of the node.
    sizes: the size of every factor; None if it is no multiple of the batch size (such factors are frozen).
    frozen: factors that may not be sharded. linear, affine, random, forms, panels: as in :class:`Annotation`.
    products: factor names of each multiplication of arrays.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, Extent | None] = field(hash=False)
    frozen: frozenset[str]
    linear: tuple[tuple[int, ...], ...] = ()
    affine: tuple[int, ...] = ()
    products: tuple[tuple[str, ...], ...] = ()
    random: bool = False
    forms: Mapping[str, LocalForm] = field(default_factory=dict, hash=False)
    panels: Panels | None = None

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors that may be sharded, in order of appearance."""
        names = [name for dims in (*self.inputs, *self.outputs) for dim in dims for name in dim]
        return tuple(name for name in dict.fromkeys(names) if name not in self.frozen)

    def size(self, factor: str) -> Extent:
        found = self.sizes[factor]
        assert found is not None, f"the size of {factor} is no multiple of the batch size"
        return found

    def __str__(self) -> str:
        def dim_text(dim: Dim) -> str:
            names = [f"^{name}" if name in self.frozen else name for name in dim]
            return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

        def side(operands: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(dim_text(dim) for dim in dims) for dims in operands)

        return f"{side(self.inputs)} -> {side(self.outputs)}"


@dataclass(frozen=True, slots=True)
class _Term:
    factors: tuple[str, ...]
    run: bool = False


_Operand = tuple[_Term, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed text, runs not yet expanded. ``frozen`` holds factor names and names of runs."""

    inputs: tuple[_Operand, ...]
    outputs: tuple[_Operand, ...]
    frozen: frozenset[str]


_TOKEN = re.compile(r"\s*(?:(\^?\*?[A-Za-z]\w*)|([()]|[_1](?!\w)))")


def _tokens(text: str, whole: str) -> Iterator[str]:
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RuleError(f"cannot read {text[position:].strip()!r} in the rule {whole!r}; expected n, ^n, *b, (h d)")
        yield match.group(1) or match.group(2)
        position = match.end()


@functools.cache
def parse(text: str) -> Pattern:
    """Reads a rule's text. Raises RuleError, naming the text and the part that cannot be read."""
    if text.count("->") != 1:
        raise RuleError(f"a rule has operands, one '->', and outputs: {text!r}")
    frozen: set[str] = set()
    runs: set[str] = set()
    singles: set[str] = set()
    anonymous = 0

    def name_of(token: str) -> str:
        name = token.lstrip("^*")
        if re.fullmatch(r"[RBP]\d*", name):
            raise RuleError(
                f"{name!r} is the name of a strategy, not of a factor, in the rule {text!r}; use another letter"
            )
        if token.startswith("^"):
            frozen.add(name)
        (runs if "*" in token else singles).add(name)
        return name

    def operand(part: str) -> _Operand:
        nonlocal anonymous
        terms: list[_Term] = []
        group: list[str] | None = None
        for token in _tokens(part, text):
            if token in ("(", ")"):
                if (token == "(") != (group is None) or group == []:
                    raise RuleError(f"parentheses do not match or hold nothing in {part.strip()!r} of {text!r}")
                if group is not None:
                    terms.append(_Term(tuple(group)))
                group = [] if token == "(" else None
            elif group is not None:
                if token in ("_", "1") or "*" in token:
                    raise RuleError(f"a dim is made of named factors, not of {token!r}, in the rule {text!r}")
                group.append(name_of(token))
            elif token == "1":
                terms.append(_Term(()))
            elif token == "_":
                name = f"_{anonymous}"
                anonymous += 1
                frozen.add(name)
                terms.append(_Term((name,)))
            else:
                terms.append(_Term((name_of(token),), run="*" in token))
        if group is not None:
            raise RuleError(f"a parenthesis is not closed in {part.strip()!r} of the rule {text!r}")
        names = [name for term in terms for name in term.factors]
        if len(set(names)) != len(names):
            raise RuleError(f"a factor stands twice in one operand, {part.strip()!r}, of the rule {text!r}")
        if sum(term.run for term in terms) > 1:
            raise RuleError(f"an operand has at most one run (*name): {part.strip()!r} in the rule {text!r}")
        return tuple(terms)

    left, right = text.split("->")
    inputs = tuple(operand(part) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(operand(part) for part in right.split(","))
    if runs & singles:
        raise RuleError(f"{min(runs & singles)!r} is both a run and a factor in the rule {text!r}")
    return Pattern(inputs, outputs, frozenset(frozen))


def _expand_runs(
    operands: Sequence[_Operand], shapes: Sequence[Extents], text: str
) -> tuple[list[Dims], dict[str, int]]:
    """Every operand's dims, and the length of every run. An operand's run takes the last names of the longest one."""
    if len(operands) != len(shapes):
        raise RuleError(f"the rule {text!r} has {len(operands)} tensors, the op has {len(shapes)}")
    lengths: dict[str, int] = {}
    for terms, shape in zip(operands, shapes, strict=True):
        run = next((term for term in terms if term.run), None)
        room = len(shape) - sum(not term.run for term in terms)
        if room < 0 or (run is None and room):
            raise RuleError(f"the rule {text!r} does not fit a tensor of {len(shape)} dims")
        if run is not None:
            lengths[run.factors[0]] = max(lengths.get(run.factors[0], 0), room)
    expanded: list[Dims] = []
    for terms, shape in zip(operands, shapes, strict=True):
        room = len(shape) - sum(not term.run for term in terms)
        dims: list[Dim] = []
        for term in terms:
            if term.run:
                (name,) = term.factors
                dims.extend((f"{name}{index}",) for index in range(lengths[name] - room, lengths[name]))
            else:
                dims.append(term.factors)
        expanded.append(tuple(dims))
    return expanded, lengths


def _solve_sizes(
    dims: Sequence[Dims], shapes: Sequence[Extents], given: Mapping[str, Extent], text: str
) -> dict[str, Extent | None]:
    """The size of every factor: first from the dims that it fills alone, then as the missing part of a product.

    Dims of known and of unknown size that share a factor are equal when the op runs, and the factor's size unknown.
    """
    sizes: dict[str, Extent | None] = dict(given)
    products: list[tuple[Dim, Extent | None]] = []
    for operand, shape in zip(dims, shapes, strict=True):
        for dim, size in zip(operand, shape, strict=True):
            if not dim and size != ONE:
                raise RuleError(f"a broadcast dim (1) of the rule {text!r} has size {size}")
            if len(dim) > 1:
                products.append((dim, size))
            elif dim:
                known = sizes.get(dim[0], ONE)
                if known is not None and size is not None and known not in (ONE, size) and size != ONE:
                    raise RuleError(f"factor {dim[0]!r} of the rule {text!r} has sizes {known} and {size}")
                sizes[dim[0]] = size if known == ONE or size is None else known
    pending = products
    while pending:
        waiting: list[tuple[Dim, Extent | None]] = []
        for dim, size in pending:
            unknown = [name for name in dim if name not in sizes]
            if len(unknown) > 1:
                waiting.append((dim, size))
                continue
            rest = _product([sizes[name] for name in dim if name in sizes])
            if unknown:
                sizes[unknown[0]] = None if size is None or rest is None else size.over(rest)
                if size is not None and rest is not None and sizes[unknown[0]] is None:
                    raise RuleError(f"a dim of {size} does not hold the factors {' '.join(dim)} of the rule {text!r}")
            elif size is None:
                sizes.update(dict.fromkeys(dim))
            elif rest is not None and size not in (ONE, rest):
                raise RuleError(f"a dim of {size} is not made of the factors {' '.join(dim)} of the rule {text!r}")
        if len(waiting) == len(pending):
            raise RuleError(f"the sizes of the factors {' '.join(waiting[0][0])} of the rule {text!r} are not known")
        pending = waiting
    return sizes


def _product(sizes: Sequence[Extent | None]) -> Extent | None:
    total: Extent | None = ONE
    for size in sizes:
        total = None if total is None or size is None else total.times(size)
    return total


def bind(annotation: Annotation, inputs: Sequence[Extents], outputs: Sequence[Extents]) -> Rule:
    """The rule for these shapes, one object for equal ones. Raises RuleError if they do not fit the text."""
    return _bound(annotation, tuple(inputs), tuple(outputs))


@functools.lru_cache(maxsize=4096)
def _bound(annotation: Annotation, inputs: tuple[Extents, ...], outputs: tuple[Extents, ...]) -> Rule:
    text = annotation.text
    pattern = parse(text)
    if not pattern.inputs and len(inputs) == 1:
        pattern = Pattern(((),), pattern.outputs, pattern.frozen)  # one scalar operand is written as nothing
    if len(pattern.inputs) != len(inputs) or len(pattern.outputs) != len(outputs):
        raise RuleError(
            f"the rule {text!r} has {len(pattern.inputs)} operands and {len(pattern.outputs)} outputs, "
            f"the op {len(inputs)} and {len(outputs)}"
        )
    shapes = [*inputs, *outputs]
    dims, runs = _expand_runs([*pattern.inputs, *pattern.outputs], shapes, text)
    sizes = _solve_sizes(dims, shapes, annotation.sizes, text)

    def settle(dim: Dim, size: Extent | None) -> Dim:
        whole = _product([sizes[name] for name in dim])
        return () if size == ONE and whole != ONE else dim

    settled = [
        tuple(settle(dim, size) for dim, size in zip(operand, shape, strict=True))
        for operand, shape in zip(dims, shapes, strict=True)
    ]
    frozen = {name for name in pattern.frozen if name not in runs}
    frozen |= {f"{name}{index}" for name, length in runs.items() if name in pattern.frozen for index in range(length)}
    frozen |= {name for name, size in sizes.items() if size is None or size.coefficient == 0}

    def named(product: Iterable[str]) -> tuple[str, ...]:
        names: list[str] = []
        for name in product:
            run = name.lstrip("*")
            names.extend([f"{run}{index}" for index in range(runs.get(run, 0))] if name.startswith("*") else [name])
        return tuple(names)

    forms = {name: _settled(form, named, sizes) for name, form in annotation.forms.items()}
    for name, form in forms.items():
        size = sizes.get(name)
        if size is None or size.batched or form is None:
            frozen.add(name)
    return Rule(
        inputs=tuple(settled[: len(inputs)]),
        outputs=tuple(settled[len(inputs) :]),
        sizes=sizes,
        frozen=frozenset(frozen),
        linear=annotation.linear,
        affine=annotation.affine,
        products=tuple(named(product.split()) for product in annotation.products),
        random=annotation.random,
        forms={name: form for name, form in forms.items() if form is not None and name not in frozen},
        panels=annotation.panels,
    )


def _settled(
    form: LocalForm, named: Callable[[Iterable[str]], tuple[str, ...]], sizes: Mapping[str, Extent | None]
) -> LocalForm | None:
    """A form whose messages name single factors and know how many elements these have; None where these do not tell."""
    messages = []
    for message in form.messages:
        names = named(message.factors)
        elements = _product([sizes[name] for name in names])
        if elements is None:
            return None
        messages.append(replace(message, factors=names, elements=elements))
    return replace(form, messages=tuple(messages))


def product_at(rule: Rule, names: Sequence[str], batch: int) -> int:
    """The product of the sizes of these factors for a batch of that many samples."""
    return math.prod(rule.size(name).at(batch) for name in names)

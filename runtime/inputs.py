"""Checks what the user passes against what was captured, and cuts it into replicas' shares and microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.errors import BatchError, InputError
from autopart.runtime.links import dtype_of
from autopart.runtime.manifest import InputSpec, Manifest, Size, size_of
from autopart.runtime.mesh import Mesh
from autopart.runtime.not_returned import NotReturned
from autopart.runtime.resharding import rows_of
from autopart.runtime.structure import flatten

BatchMode = Literal["global", "local"]
Returned = Literal["loss", "all"]
# The shapes of the tensors among a program's inputs, with "b" for samples, in the manifest's order.
Sizes = tuple[tuple[Size, ...], ...]


@dataclass(frozen=True, slots=True)
class Division:
    """How a batch is divided: ``batch`` samples over ``replicas`` (this rank's is ``replica``) and ``microbatches``.

    shares: parts of the replicas in each microbatch where stages have unlike meshes or replicas unlike parts; a
    microbatch then is a run of the batch, the same on all stages. Empty: equal parts, each a run of the batch with the
    replica's microbatches. is_local: this rank was given its replica's samples alone; the batch then is what replicas
    were given one after the other. in_copies: each replica of every stage computes all samples of a microbatch.
    """

    batch: int
    replicas: int
    replica: int
    microbatches: int
    shares: tuple[int, ...] = ()
    is_local: bool = False
    in_copies: bool = False

    @property
    def rows(self) -> tuple[int, ...]:
        """Samples in one microbatch on each replica, where these have parts."""
        return rows_of(self.whole, self.shares)

    @property
    def whole(self) -> int:
        """Samples in one microbatch over all replicas."""
        return self.batch // self.microbatches

    @property
    def samples(self) -> int:
        """Samples in one microbatch on one rank."""
        if self.shares:
            return self.rows[self.replica]
        return self.batch // (self.replicas * self.microbatches)

    def start(self, microbatch: int) -> int:
        """The first sample of this rank's microbatch, counted in the whole batch."""
        if self.shares and not self.is_local:
            return microbatch * self.whole + sum(self.rows[: self.replica])
        return self._before + microbatch * self.samples

    def given_start(self, microbatch: int) -> int:
        """The same, counted in what this rank was given."""
        return self.start(microbatch) - (self._before if self.is_local else 0)

    @property
    def given(self) -> tuple[int, ...]:
        """The samples that each replica was given, where ``is_local``."""
        rows = self.rows if self.shares else (self.samples,) * self.replicas
        return tuple(self.microbatches * own for own in rows)

    @property
    def _before(self) -> int:
        """Samples of the replicas before this one, where each has a run of the batch."""
        return sum(self.given[: self.replica])


def check_modes(batch: str, outputs: str) -> None:
    """Raises InputError: another word for how batches are passed would train on wrong parts of them."""
    for name, value, known in (("batch", batch, BatchMode), ("outputs", outputs, Returned)):
        if value not in get_args(known):
            raise InputError(f"{name} is one of {', '.join(map(repr, get_args(known)))}, not {value!r}")


def bind(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call's arguments by path, named as the model's own forward would take them.

    Arguments that have their defaults are as good as left out. Raises InputError for too many or doubled arguments.
    """
    by_position = [spec.name for spec in manifest.arguments if spec.by_position]
    names = [*by_position, *(name for name in manifest.input_names if name not in by_position)]
    if len(args) > len(names):
        raise InputError(f"{len(args)} positional inputs were given, the model was captured with {names}")
    arguments = dict(zip(names, args, strict=False))
    doubled = sorted(arguments.keys() & kwargs.keys())
    if doubled:
        raise InputError(f"input {doubled[0]!r} is given twice, by position and by name")
    arguments.update(kwargs)
    constants = {spec.name for spec in manifest.inputs if spec.kind == "constant"}
    for spec in manifest.arguments:
        if not spec.has_default:
            continue
        if spec.name in constants:
            arguments.setdefault(spec.name, spec.default)
        elif spec.name not in manifest.input_names and _same(spec.default, arguments.get(spec.name, spec.default)):
            arguments.pop(spec.name, None)
    leaves: dict[str, Any] = {}
    for name, value in arguments.items():
        leaves.update(flatten(value, name)[0])
    return leaves


def fits(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether these are inputs of the program, of whatever sizes."""
    try:
        leaves = bind(manifest, args, kwargs)
        check(at_sizes(manifest, sizes_of(manifest, leaves), gradients=True), leaves)
    except InputError:
        return False
    return True


def sizes_of(manifest: Manifest, leaves: Mapping[str, Any]) -> Sizes:
    """The sizes of a call's inputs; the planned ones where an input is no tensor with as many dims."""
    found = []
    for spec in manifest.inputs:
        leaf = leaves.get(spec.name)
        if spec.kind != "tensor":
            continue
        if isinstance(leaf, Tensor) and leaf.dim() == len(spec.shape):
            pairs = zip(spec.shape, leaf.shape, strict=True)
            found.append(tuple(planned if isinstance(planned, str) else int(size) for planned, size in pairs))
        else:
            found.append(spec.shape)
    return tuple(found)


def at_sizes(manifest: Manifest, sizes: Sizes, gradients: bool = False) -> Manifest:
    """The manifest with inputs of these sizes. gradients: and which may all require one."""
    remaining = iter(sizes)
    inputs = (
        replace(spec, shape=next(remaining), differentiable=spec.differentiable or gradients)
        if spec.kind == "tensor"
        else spec
        for spec in manifest.inputs
    )
    return replace(manifest, inputs=tuple(inputs))


def sizes_text(manifest: Manifest, sizes: Sizes) -> str:
    """Sizes for people: ``input_ids [b, 97], labels [b, 97]``."""
    tensors = [spec for spec in manifest.inputs if spec.kind == "tensor"]
    return ", ".join(f"{spec.name} {_shape_text(shape)}" for spec, shape in zip(tensors, sizes, strict=True))


def changes_text(manifest: Manifest, sizes: Sizes, samples: int, gradients: Collection[str]) -> str:
    """What differs from the planned inputs: ``input_ids [b, 97] instead of [b, 128]``."""
    tensors = [spec for spec in manifest.inputs if spec.kind == "tensor"]
    found = [
        f"{spec.name} {_shape_text(shape)} instead of {_shape_text(spec.shape)}"
        for spec, shape in zip(tensors, sizes, strict=True)
        if shape != spec.shape
    ]
    if manifest.fixed_batch and samples != manifest.fixed_batch:
        found.append(f"{samples} samples instead of {manifest.fixed_batch}")
    if set(gradients) != {spec.name for spec in tensors if spec.differentiable}:
        found.append(f"gradients of {', '.join(sorted(gradients)) or 'no input'}")
    return ", ".join(found)


def check(manifest: Manifest, leaves: Mapping[str, Any]) -> int:
    """The number of samples in these inputs.

    Raises InputError that names the input, what was expected and what was found: for missing and unknown inputs,
    shapes, dtypes, sizes of the batch that contradict each other, and constants that differ from the captured ones.
    """
    specs = {spec.name: spec for spec in manifest.inputs}
    unread = {name.split(".")[0] for name, spec in specs.items() if spec.kind == "unread"}
    for name, leaf in leaves.items():
        if isinstance(leaf, NotReturned):
            raise InputError(f"input {name!r} is {leaf!r}")
        if name not in specs and name.split(".")[0] not in unread:
            raise InputError(
                f"input {name!r} ({_describe(leaf)}) was not there when the model was captured; expected are "
                f"{sorted(specs)}. Pass it from the first call on, or with the example inputs; for single calls that "
                "compute otherwise, load what state_dict() gives into a model of one process"
            )
    batch: int | None = None
    for spec in manifest.inputs:
        leaf = leaves.get(spec.name)
        if spec.kind == "unread":
            continue
        if spec.kind == "constant":
            if spec.constant is None and not isinstance(leaf, int | float | str | Tensor | None):  # no value was kept
                raise InputError(
                    f"input {spec.name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which is neither a "
                    "tensor nor a number or a string: pass an array as torch.from_numpy(...), and leave out what "
                    "forward does not read"
                )
            if not _same(spec.constant, leaf):
                raise InputError(
                    f"input {spec.name!r} was {spec.constant!r} when the model was captured and is now "
                    f"{_describe(leaf)}; the program has that value written in: {_instead(spec.constant, leaf)}"
                )
            continue
        if not isinstance(leaf, Tensor):
            found = "is missing" if leaf is None else f"is {_describe(leaf)}"
            otherwise = (
                ". The program computes with it in every call, as when the model was captured; for single calls that "
                "compute otherwise, as without labels, load what state_dict() gives into a model of one process"
            )
            raise InputError(
                f"input {spec.name!r} {found}; expected is a tensor {spec.dtype} {_shape_text(spec.shape)}"
                f"{otherwise if leaf is None else ''}"
            )
        batch = _check_tensor(spec, leaf, batch)
    return 1 if batch is None else batch


def _check_tensor(spec: InputSpec, leaf: Tensor, batch: int | None) -> int | None:
    where = f"input {spec.name!r} has the shape {list(leaf.shape)}; expected is {_shape_text(spec.shape)}"
    if leaf.dtype != dtype_of(spec.dtype):
        raise InputError(f"input {spec.name!r} has the dtype {leaf.dtype}; expected is {dtype_of(spec.dtype)}")
    if leaf.requires_grad and not spec.differentiable and torch.is_grad_enabled():
        raise InputError(
            f"input {spec.name!r} requires a gradient, which this program does not give, as the input required none "
            "when it was captured; detach it, or let parallelize capture the model with it"
        )
    if leaf.dim() != len(spec.shape):
        raise InputError(where)
    for size, found in zip(spec.shape, leaf.shape, strict=True):
        if isinstance(size, str):
            factor = size_of(size, 1)
            if found == 0 and batch is None:
                raise InputError(f"{where}; it has no samples: pass over empty batches, on all ranks")
            if found % factor or (batch is not None and found != factor * batch) or found == 0:
                if batch is None:
                    raise InputError(where)
                raise InputError(
                    f"{where} with b = {batch} as in the inputs before. Where one of these dims has no samples, pass "
                    "batch_dims with the dim that has, or None, for each input"
                )
            batch = found // factor
        elif size != found:
            samples = ", with b samples" * ("b" in _shape_text(spec.shape))
            raise InputError(
                f"{where}{samples}; only the number of samples may change: pad what is shorter, or let parallelize "
                "make a program for each size"
            )
    return batch


def given_samples(samples: int, mesh: Mesh) -> tuple[int, ...]:
    """How many samples each replica was given, this one ``samples``."""
    sizes = torch.zeros(mesh.data.size, dtype=torch.int64, device=mesh.device)
    sizes[mesh.data.index] = samples
    if mesh.data.size > 1:
        dist.all_reduce(sizes, group=mesh.data.group)
    return tuple(sizes.tolist())


def divide(
    manifest: Manifest,
    found: int,
    replicas: int,
    replica: int,
    shares: tuple[int, ...] = (),
    given: tuple[int, ...] | None = None,
) -> Division:
    """How a batch of ``found`` samples is divided.

    A batch that does not divide by replicas times microbatches, such as the last of an epoch, is run in fewer
    microbatches, or if it does not divide by the replicas whole on every one of them. Nothing is padded. Where meshes
    or parts differ replicas get whole rows near their parts, so that only a batch with fewer samples than some stage
    has replicas is run whole on every one.

    shares: parts of the replicas of this rank's stage, see :class:`Division`. given: with local batches what each
    replica was given; ``found`` is this one's. Raises BatchError for more samples in a microbatch than the program
    holds for; with local batches, for parts that are not the replicas' shares.
    """
    if not manifest.is_uniform:
        return _divide_unlike(manifest, found, replica, shares, given)
    if given is not None and len(set(given)) > 1:
        raise BatchError(
            f'with batch="local" every replica passes as many samples; found {min(given)} to {max(given)} (here '
            f"{found}); drop the last partial batch, or pass whole batches"
        )
    batch = found if given is None else sum(given)
    if batch % replicas:
        return _in_copies(manifest, batch)
    share = batch // replicas
    count = _most_microbatches(manifest, share)
    _check_most(manifest, share // count)
    return Division(batch, replicas, replica, count, is_local=given is not None)


def _in_copies(manifest: Manifest, batch: int) -> Division:
    count = _most_microbatches(manifest, batch)
    _check_most(manifest, batch // count)
    return Division(batch, 1, 0, count, in_copies=True)


def _most_microbatches(manifest: Manifest, samples: int) -> int:
    return max(count for count in range(1, manifest.microbatches + 1) if samples % count == 0)


def _check_most(manifest: Manifest, samples: int) -> None:
    if manifest.most_samples and samples > manifest.most_samples:
        raise BatchError(
            f"a microbatch has {samples} samples, and the model's code was captured for at most "
            f"{manifest.most_samples}; plan more microbatches, or pass smaller batches"
        )


def _divide_unlike(
    manifest: Manifest, found: int, replica: int, shares: tuple[int, ...], given: tuple[int, ...] | None
) -> Division:
    """Where meshes or parts differ, every replica of every stage gets whole rows of each microbatch, if there are any
    for it; else each computes them all.
    """
    if given is not None:
        return _divide_given(manifest, given, replica, shares)
    least = max(len(stage.replica_shares) for stage in manifest.stages)
    for count in range(manifest.microbatches, 0, -1):
        if found % count == 0 and found // count >= least:
            _check_most(manifest, found // count)
            return Division(found, len(shares), replica, count, shares)
    return _in_copies(manifest, found)


def _divide_given(manifest: Manifest, given: tuple[int, ...], replica: int, shares: tuple[int, ...]) -> Division:
    """Where replicas have unlike parts of the batch, the same on all stages, and each was given its own."""
    if len({stage.replica_shares for stage in manifest.stages}) > 1:
        raise BatchError(
            'batch="local" gives each replica its own part, but stages of this plan have unlike replicas; '
            'pass every rank the whole batch (batch="global")'
        )
    batch = sum(given)
    for count in range(manifest.microbatches, 0, -1):
        if batch % count or batch // count < len(shares):
            continue
        division = Division(batch, len(shares), replica, count, shares, is_local=True)
        if division.given == given:
            _check_most(manifest, division.whole)
            return division
    parts, found = ":".join(map(str, shares)), ", ".join(map(str, given))
    would = ", ".join(str(manifest.microbatches * share) for share in shares)
    raise BatchError(
        f'with batch="local" the replicas of this plan pass {parts} of each batch (model.data_shares), such as {would} '
        f"samples; found {found}"
    )


def microbatch_of(
    specs: Sequence[InputSpec], leaves: Mapping[str, Any], division: Division, microbatch: int, device: torch.device
) -> dict[str, Tensor]:
    """These inputs' share of a microbatch, on the device."""
    share: dict[str, Tensor] = {}
    for spec in specs:
        tensor: Tensor = leaves[spec.name]
        if spec.batch_dim is not None:
            rows = size_of(spec.shape[spec.batch_dim], 1) if isinstance(spec.shape[spec.batch_dim], str) else 1
            start = division.given_start(microbatch)
            tensor = tensor.narrow(spec.batch_dim, start * rows, division.samples * rows)
        share[spec.name] = _moved(tensor, device)
    return share


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device. To a GPU by way of pinned memory, which torch keeps until it was read, so that nothing waits; what
    is pinned already is read where it is.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _same(captured: Any, leaf: Any) -> bool:
    """Subclasses of numbers and strings, as NumPy's and enumerations, are what they are equal to."""
    if isinstance(captured, bool) != isinstance(leaf, bool) or not isinstance(leaf, type(captured)):
        return False
    return bool(leaf == captured or (leaf != leaf and captured != captured))


def _instead(captured: Any, leaf: Any) -> str:
    """What to do where an input that is no tensor changes between calls."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in (captured, leaf)):
        return "pass a number that changes as a tensor, torch.tensor(...), from the first call on"
    if captured is None or leaf is None or isinstance(leaf, Tensor):
        return "pass a tensor in every call, or in none"
    return (
        "leave out what forward does not read, such as names of samples, and pass the same value otherwise; where it "
        "chooses among results, let forward return all of them, and choose in the script"
    )


def _describe(leaf: Any) -> str:
    return f"a tensor {leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _shape_text(shape: Sequence[Size]) -> str:
    return f"[{', '.join(map(str, shape))}]"

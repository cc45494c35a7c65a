"""Solved problems on disk, so that the same problem is not solved twice: those of tensor splits, and numbers of others.

An entry's name is a hash of everything that the answer follows from: the problem's whole content, the solver's limits
(a search that was cut short would go on under a longer one), and the versions of autopart, of its solvers' sources and
of OR-Tools. Only answers that are proved as good as was asked for are kept: one that time cut short need not come out
again. What is read is checked against the problem, its objective computed anew, and numbers by how many they are; an
entry that does not fit, or that cannot be read, is solved again and written over. So a cache gives an answer that
solving gives, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache as remembered
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from autopart import cache
from autopart.solver import tensor_transient
from autopart.solver.tensor_problem import CostTable, Op, TensorProblem, TensorSolution, relative_gap

FOLDER, NUMBERS = "solved", "numbers"
VERSION = 1
_NEAR = 1e-12
_PROVED = 1e-7
"""Objective and bound count as equal within that share of the objective."""


def solve(
    problem: TensorProblem,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    solver: Callable[..., TensorSolution] = tensor_transient.solve,
    below: float = math.inf,
) -> TensorSolution:
    """As :func:`autopart.solver.tensor_transient.solve`, from the cache where the answer is there. Raises what it does.

    gap: how far from its bound an answer may be; 0 for the optimum, which is what a ``solver`` without a gap gives.
    below: where no answer takes less, a solver may stop at a lower bound than the answer's, so it is asked again.
    """
    limits = (time_limit_s, gap) if gap else (time_limit_s,)
    if below < math.inf:
        solver = partial(solver, below=below)
    folder = cache.answers(FOLDER)
    if folder is None:
        return solver(problem, *limits)
    name = key(problem, *limits)
    path = folder / name[:2] / f"{name}.json"
    wanted = max(_PROVED, gap)
    known = _read(path, problem, wanted)
    if known is not None and known.objective < below:
        return known
    solution = solver(problem, *limits)
    if solution.gap <= wanted and solution.objective < below:
        with contextlib.suppress(OSError):  # a full or read-only disk costs the next run its time, no more
            cache.keep(path, _written(solution))
    return solution


def numbers(content: object, count: int, make: Callable[[], list[float]]) -> list[float]:
    """``count`` numbers that follow from the content, and from the sources of solvers: from the cache, or made."""
    folder = cache.answers(NUMBERS)
    if folder is None:
        return make()
    name = key(content)
    path = folder / name[:2] / f"{name}.json"
    known = (cache.kept(path) or {}).get("numbers")
    if isinstance(known, list) and len(known) == count and all(isinstance(item, float) for item in known):
        return known
    made = make()
    with contextlib.suppress(OSError):
        cache.keep(path, {"numbers": made})
    return made


def key(content: object, *limits: float) -> str:
    """The hash by which an answer is found: that to a problem, or what follows from something else."""
    digest = hashlib.sha256()
    for part in (VERSION, *_versions(), limits):
        digest.update(f"{part!r}\n".encode())
    _feed(content, digest.update)
    return digest.hexdigest()


@remembered
def _versions() -> tuple[str, ...]:
    found = []
    for name in ("autopart", "ortools"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} unknown")
    # The version of a working copy stands still while its solver changes.
    sources = sorted(Path(__file__).parent.glob("*.py"))
    found.append(hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest())
    return tuple(found)


def _feed(item: Any, update: Callable[[bytes], None]) -> None:
    """Every field of every part, with its type and place; numbers exactly."""
    if isinstance(item, Op):
        update(repr(item).encode())  # all fields of all choices, and much faster than one by one
    elif is_dataclass(item) and not isinstance(item, type):
        update(f"{type(item).__name__}(".encode())
        for entry in fields(item):
            update(f"{entry.name}=".encode())
            _feed(getattr(item, entry.name), update)
        update(b")")
    elif isinstance(item, tuple | list):
        update(f"[{len(item)}:".encode())
        for part in item:
            _feed(part, update)
        update(b"]")
    elif isinstance(item, CostTable):
        update(f"table {list(item.rows)} {list(item.columns)}".encode() + item.seconds.tobytes())
    elif isinstance(item, np.ndarray):
        update(f"array {item.dtype} {item.shape} ".encode() + item.tobytes())
    elif isinstance(item, Mapping):
        update(f"{sorted(item.items())!r};".encode())
    else:
        update(f"{type(item).__name__} {item!r};".encode())


def _written(solution: TensorSolution) -> dict[str, Any]:
    return {
        "choices": list(solution.choices),
        "objective": solution.objective,
        "bound": solution.bound,
        "method": solution.method,
    }


def _read(path: Path, problem: TensorProblem, wanted: float) -> TensorSolution | None:
    """The entry as an answer to the problem with a gap of at most ``wanted``; None where it is none."""
    data = cache.kept(path)
    if data is None:
        return None
    try:
        choices = tuple(data["choices"])
        objective, bound, method = float(data["objective"]), float(data["bound"]), str(data["method"])
        valid = len(choices) == len(problem.ops) and all(
            isinstance(choice, int) and 0 <= choice < len(op.choices)
            for choice, op in zip(choices, problem.ops, strict=True)
        )
    except (KeyError, TypeError, ValueError):
        return None
    if not valid or not problem.fits(choices):
        return None
    if abs(problem.objective(choices) - objective) > _NEAR * objective or not 0 <= bound <= objective:
        return None
    gap = relative_gap(objective, bound)
    if gap > wanted:
        return None
    return TensorSolution(choices, objective, bound, gap, 0.0, method, problem.conversions(choices))

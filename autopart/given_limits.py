"""What ``make_plan`` is given, checked for its types: an error says what was expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from autopart.cluster import Cluster
from autopart.passes.program import Program
from autopart.passes.rules import RuleBook
from autopart.runtime.errors import ClusterError, PlanError

MOST_SAMPLES = 2**31
"""Of a batch: its divisors are looked for one by one."""


def check_given(program: object, cluster: object, rules: object) -> None:
    """Raises PlanError, ClusterError where they are something else than their names say."""
    if not isinstance(program, Program):
        raise PlanError(f"make_plan takes a Program, such as autopart.capture(model, args), not a {_kind(program)}")
    if not isinstance(cluster, Cluster):
        raise ClusterError(f"make_plan takes a Cluster, such as Cluster.parse('8xH100'), not {cluster!r}")
    if not isinstance(rules, RuleBook):
        raise PlanError(f"rules is a RuleBook, such as RULES.extended({{...}}), not a {_kind(rules)}")


def check_counts(counts: Mapping[str, object]) -> None:
    """Raises PlanError where one is given that is no whole number of at least 1, or a batch is out of proportion."""
    for name, count in counts.items():
        if count is not None and not (is_whole(count) and count >= 1):
            raise PlanError(f"{name} is a whole number of at least 1, not {count!r}")
    batch = counts.get("batch")
    if is_whole(batch) and batch > MOST_SAMPLES:
        raise PlanError(f"batch is at most {MOST_SAMPLES:,} samples, not {batch:,}")


def check_seconds(time_limit_s: object, below: object) -> None:
    """Raises PlanError where they are no seconds."""
    for name, value in (("time_limit_s", time_limit_s), ("below", below)):
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value < 0:
            raise PlanError(f"{name} is a number of seconds from 0 on, not {value!r}")


def check_warmups(warmup: object) -> None:
    """Raises PlanError where it is neither forwards nor a list of them."""
    given = warmup if isinstance(warmup, tuple | list) else (warmup,)
    if warmup is not None and not all(map(is_whole, given)):
        raise PlanError(f"warmup is a number of forwards, or one for each stage such as (2, 1, 0), not {warmup!r}")


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: object) -> str:
    return type(value).__name__

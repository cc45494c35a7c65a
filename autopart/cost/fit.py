"""The few constants that no datasheet gives, fitted to one half of the published step times.

Even rows of every table (the first, third, …) are for fitting, odd rows for testing; :func:`fit` looks at the first
only. Least squares of ``log(predicted / measured)``, every table with the same weight, by coordinate descent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from types import MappingProxyType

from autopart.cluster import Cluster, Link, Node
from autopart.cost.published import Measurement

ETHERNET = "Ethernet"
START: Mapping[str, float] = MappingProxyType(
    {"V100-16GB": 0.7, "V100-32GB": 0.7, "A100-80GB": 0.7, "H100": 0.7, ETHERNET: 0.7}
)
"""What is fitted: ``contraction`` by device, ``efficiency`` of Ethernet; and where the search starts."""
_FIRST_STEP = 0.08
_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Fit:
    """constants: by name as in ``START``. loss: mean squared log error of the tables, summed."""

    constants: Mapping[str, float]
    loss: float


def with_constants(cluster: Cluster, constants: Mapping[str, float]) -> Cluster:
    """The cluster with these constants in place of its presets'."""
    seen: dict[Node, Node] = {}
    for node in cluster.nodes:
        if node not in seen:
            share = constants.get(node.device.name, node.device.contraction)
            seen[node] = replace(
                node, device=replace(node.device, contraction=share), port=_with_efficiency(node.port, constants)
            )
    return Cluster(tuple(seen[node] for node in cluster.nodes))


def _with_efficiency(link: Link, constants: Mapping[str, float]) -> Link:
    if not link.name.startswith(ETHERNET) or ETHERNET not in constants:
        return link
    return replace(link, efficiency=constants[ETHERNET])


def loss(measurements: Sequence[Measurement], constants: Mapping[str, float]) -> float:
    """Mean squared log error by table, summed over tables."""
    errors: dict[str, list[float]] = {}
    for item in measurements:
        _, predicted = replace(item, cluster=with_constants(item.cluster, constants)).best()
        errors.setdefault(item.table, []).append(log(predicted / item.seconds) ** 2)
    return sum(sum(found) / len(found) for found in errors.values())


def fit(measurements: Sequence[Measurement], start: Mapping[str, float] = START) -> Fit:
    """The constants with the least loss over the measurements of the fit half; the others are not looked at."""
    used = [item for item in measurements if item.half == "fit"]
    constants, best = dict(start), loss(used, start)
    steps = dict.fromkeys(constants, _FIRST_STEP)
    for _ in range(_ROUNDS):
        for name in constants:
            tried = [
                {**constants, name: constants[name] * factor} for factor in (1 + steps[name], 1 / (1 + steps[name]))
            ]
            found = [(loss(used, item), item) for item in tried if item[name] <= 1]
            least, item = min(found, key=lambda pair: pair[0])
            if least < best:
                best, constants = least, item
            else:
                steps[name] /= 2
    return Fit(MappingProxyType(constants), best)

"""Clusters for tests: devices for which splitting pays, however small the model is."""

from __future__ import annotations

from autopart.cluster import Cluster, Device, Link, Node


def ideal(devices: int, bandwidth: float = 1e12, memory_bandwidth: float = 1e12, memory_bytes: int = 2**40) -> Cluster:
    """Devices bound by arithmetic, launched for nothing, on links without latency.

    A real device's launch overhead hides the work of a tiny model, so that a planner would rightly not split its ops.
    """
    device = Device("ideal", "cuda", memory_bytes, {"float32": 1e10, "float64": 1e10}, memory_bandwidth, 0.0)
    link = Link("ideal", bandwidth, 0.0)
    return Cluster((Node(device, devices, link, link, 1),))

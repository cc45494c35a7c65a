"""What a plan says of its cluster that follows from more than its numbers: from what is known of this host now."""

from __future__ import annotations

from autopart.cluster import Cluster
from autopart.cost.calibrated import outdated


def speeds(cluster: Cluster) -> list[str]:
    """A note of where the speeds of devices are from, where they were measured or could have been."""
    ranks = sorted({device.measured for device in cluster.devices if device.measured})
    text = " and ".join("1 rank" if count == 1 else f"{count} ranks at once" for count in ranks)
    if ranks:
        return [f"speeds are those that autopart calibrate measured with {text}"]
    versions = outdated("cpu") if any(node.is_this_host for node in dict.fromkeys(cluster.nodes)) else None
    if versions is None:
        return []
    return [
        f"speeds are presets: this host was calibrated with {versions}, not with what is installed now; run autopart "
        "calibrate again"
    ]


def identity(cluster: Cluster) -> tuple[object, ...]:
    """All of a cluster that is in a plan: its numbers, its name, and the note of its speeds.

    Where a host is calibrated, a file that described it may not be what ``cpu:4`` stands for any more.
    """
    return cluster, str(cluster), *speeds(cluster)

"""Calibrations on disk, and which of them fits this host: by device, number of its cores, and library versions.

They lie in the cache folder (:mod:`autopart.cache`), one file for each device, set of libraries and number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from autopart import cache
from autopart.cost import devices as presets
from autopart.cost.calibration import Calibration
from autopart.cost.devices import Device
from autopart.runtime.errors import ClusterError
from autopart.runtime.files import named

FOLDER = "calibration"


def host_cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(kind: str) -> str:
    """As the driver names the first GPU, or the operating system the processor."""
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine if hasattr(os, "uname") else "CPU"


def libraries(kind: str) -> dict[str, str]:
    """Versions of what the kernels and collectives come from."""
    found = {"torch": metadata.version("torch")}
    if kind == "cuda":
        import torch

        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def base_device(kind: str) -> Device:
    """What a calibration of this host starts from: the preset, or for a GPU without one what its driver says."""
    if kind == "cpu":
        return presets.device("CPU")
    import torch

    name, about = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0)
    try:
        return presets.from_cuda_name(name)
    except ClusterError:
        like = presets.device("A100-40GB")
        return Device(
            name.replace(" ", "-"),
            "cuda",
            about.total_memory,
            dict(like.peak_flops),
            like.memory_bandwidth,
            like.launch_s,
            about.multi_processor_count,
        )


def path_of(found: Calibration) -> Path | None:
    """Where it is stored; None where the cache is off."""
    folder = cache.folder(FOLDER)
    if folder is None:
        return None
    key = json.dumps([found.device, found.cores, sorted(found.libraries.items()), found.processes])
    slug = re.sub(r"[^a-z0-9]+", "-", found.device.lower()).strip("-")[:40]
    return folder / f"{slug}-{found.processes}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def check_folder() -> None:
    """Raises ClusterError where the folder of calibrations cannot be written; nothing where the cache is off."""
    folder = cache.folder(FOLDER)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ClusterError(
            f"a calibration cannot be stored in {folder}: {error.strerror}; set {cache.VARIABLE} to a folder that can "
            f"be written, or to {cache.OFF} to store nothing"
        ) from error


def store(found: Calibration) -> Path | None:
    """Writes it, in place of an older one of the same. Raises OSError; None where the cache is off."""
    path = path_of(found)
    if path is not None:
        with named(path):
            cache.write(path, json.dumps(found.to_json_object(), indent=1))
    return path


def find(kind: str, processes: int) -> Calibration | None:
    """This host's calibration for that many ranks, else the one with the nearest number; None where there is none.

    Files that hold no calibration are left alone, with a warning that names them.
    """
    mine = libraries(kind)
    fitting = [found for found in _of_this_host(kind) if dict(found.libraries) == mine]
    # Of two that are equally near, the one that measured the greater load.
    return min(fitting, key=lambda item: (abs(item.processes - processes), -item.processes), default=None)


def outdated(kind: str) -> str | None:
    """The libraries that this host was calibrated with, where all calibrations of it are of other versions."""
    found = [dict(item.libraries) for item in _of_this_host(kind)]
    if not found or libraries(kind) in found:
        return None
    return ", ".join(f"{name} {version}" for name, version in found[-1].items())


def _of_this_host(kind: str) -> list[Calibration]:
    """All of this device and number of cores, whatever the libraries; warns of files that hold none."""
    folder = cache.folder(FOLDER)
    if folder is None or not folder.is_dir():
        return []
    mine = (kind, device_name(kind), host_cores())
    found = (_read(path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.json")))
    return [item for item in found if item is not None and (item.kind, item.device, item.cores) == mine]


@functools.cache
def _read(path: Path, changed_ns: int) -> Calibration | None:
    """What a file holds, told apart by when it was changed: it is read, and warned of, once in a process."""
    try:
        if (data := cache.read_object(path)) is None:
            raise ClusterError("not readable as a JSON object")
        return Calibration.from_json_object(data)
    except ClusterError as error:
        warnings.warn(f"{path}: {error}; remove it, or run 'autopart calibrate' again", stacklevel=2)
        return None

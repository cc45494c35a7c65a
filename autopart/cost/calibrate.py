"""From this rank's measurements to a calibration: measured together, fitted everywhere alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autopart.cost.calibrated import base_device, device_name, host_cores, libraries
from autopart.cost.calibration import Calibration, fit
from autopart.cost.measure import effort_for, measure


def calibrate(device: torch.device, quick: bool, progress: Callable[[str], None] = lambda _: None) -> Calibration:
    """Measures and fits; in a job all ranks call this together and get the same answer.

    device: this rank's. Raises ClusterError where the measurements do not suffice for a fit.
    """
    samples = measure(device, effort_for(device.type, quick), progress)
    progress("fitting")
    found = fit(samples, base_device(device.type))
    joined = dist.is_available() and dist.is_initialized()
    return Calibration(
        device=device_name(device.type),
        kind=device.type,
        processes=dist.get_world_size() if joined else 1,
        threads=torch.get_num_threads(),
        cores=host_cores(),
        libraries=libraries(device.type),
        rates=dict(found.device.peak_flops),
        memory_bandwidth=found.device.memory_bandwidth,
        launch_s=found.device.launch_s,
        attention=dict(found.device.attention_by),
        link=found.link,
        samples=tuple(samples),
        host_s=found.device.host_s,
        unaligned=found.device.unaligned,
        function_s=found.device.function_s,
        random_s=found.device.random_s,
        mapped_s=found.device.mapped_s,
        attention_back=dict(found.device.attention_back_by),
    )

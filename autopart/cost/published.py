"""Published step times and the plans that they were measured with.

The tables stand beside this file in ``published/``. What they leave out is taken from the authors' own scripts:

- Megatron-LM, SC'21, table 1: microbatch sizes and layers per chunk from ``examples/sc21/run_table_1.sh``
  (github.com/NVIDIA/Megatron-LM): 16, 16, 16, 8, 4, 2, 2, 1, 1, 1 samples; 5, 5, 3, 1 layers a chunk from 76B to 530B.
  For 39B and 1T the script names no chunks while the paper (section 5.1) has them interleaved: two chunks, the fewest.
  Recomputation of every layer, scatter/gather; torch's DDP, which overlaps, where there is one stage.
- Tensor parallel only: the batch is one microbatch.
- Alpa: ``benchmark/alpa`` (github.com/alpa-projects/alpa). Intra-op only: logical meshes (replicas x tensor) and
  microbatches of ``exp_intra_only.py``, gradients reduce-scattered and weights updated in shares. Inter-op only: one
  GPU a stage, pieces finer than a layer for 39B, the number of microbatches the best of those that
  ``exp_inter_only.py`` tries. Megatron-LM: the table's plan; where it names none, the best under the model of all
  (tp, pp, dp, samples) that fit in memory, for 39B of the two that ``paper_manual_gpt_suite.py`` tries.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from autopart.cluster import Cluster
from autopart.cost.gpt import Gpt
from autopart.cost.training import Layout, fits, step_seconds

VOCABULARY = 51200
HALVES = ("fit", "test")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A published row. layouts: the plan, or those whose best it is by its authors' account. half: "fit" or "test"."""

    table: str
    column: str
    name: str
    model: Gpt
    cluster: Cluster
    batch: int
    layouts: tuple[Layout, ...]
    seconds: float
    half: str

    def best(self) -> tuple[Layout, float]:
        """The plan and its predicted seconds."""
        priced = [(layout, step_seconds(self.model, self.cluster, layout, self.batch).total) for layout in self.layouts]
        return min(priced, key=lambda item: item[1])

    @property
    def flops_per_device(self) -> float:
        return self.model.flops(self.batch) / self.cluster.device_count


def published_text(name: str) -> str:
    """``published/NAME.csv``."""
    return resources.files("autopart.cost").joinpath("published", f"{name}.csv").read_text()


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of ``published/NAME.csv``, comments left out."""
    return list(csv.DictReader(line for line in published_text(name).splitlines() if not line.startswith("#")))


def _half(index: int) -> str:
    return "test" if index % 2 else "fit"


# Parameters (10^9) -> samples of a microbatch, layers per chunk (0: one stage).
_SC21 = {
    "1.7": (16, 0), "3.6": (16, 0), "7.5": (16, 0), "18.4": (8, 0), "39.1": (4, 12), "76.1": (2, 5), "145.6": (2, 5),
    "310.1": (1, 3), "529.6": (1, 1), "1008.0": (1, 1),
}  # fmt: skip


def sc21() -> Iterator[Measurement]:
    """Megatron-LM on up to 3,072 A100."""
    for index, row in enumerate(read_table("megatron_sc21_table1")):
        tp, pp, gpus = int(row["tp"]), int(row["pp"]), int(row["gpus"])
        model = Gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 2048, VOCABULARY)
        samples, chunk = _SC21[row["params_b"]]
        chunks = model.layers // pp // chunk if chunk else 1
        layout = Layout(tp, pp, gpus // tp // pp, samples, chunks, scatter=True, overlap=pp == 1)
        yield Measurement(
            "megatron_sc21_table1", "", f"{row['params_b']}B", model, Cluster.parse(f"{gpus // 8}x8xA100-80GB"),
            int(row["batch"]), (layout,), float(row["sec_per_iter"]), _half(index),
        )  # fmt: skip


_SERVERS = {"DGX-2 (V100-32GB)": "V100-32GB", "DGX A100": "A100-80GB"}


def tensor_only() -> Iterator[Measurement]:
    """Megatron-LM within one server."""
    for index, row in enumerate(read_table("megatron_tp_only")):
        gpus, batch = int(row["gpus"]), int(row["batch"])
        model = Gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 1024, VOCABULARY)
        device = _SERVERS[row["machine"]]
        yield Measurement(
            "megatron_tp_only", "", f"{row['params_b']}B {device}", model, Cluster.parse(f"{gpus}x{device}"),
            batch, (Layout(gpus, 1, 1, batch),), float(row["ms_per_iter"]) / 1000, _half(index),
        )  # fmt: skip


# exp_intra_only.py: replicas, tensor ranks, samples of a microbatch on one replica.
_INTRA = {
    "350M": (1, 1, 16), "760M": (2, 1, 8), "1.3B": (4, 1, 4), "2.6B": (4, 2, 8), "6.7B": (2, 8, 8), "15B": (4, 8, 2),
    "39B": (2, 32, 1),
}  # fmt: skip
# exp_inter_only.py: numbers of microbatches tried.
_INTER = {
    "350M": (64, 128, 256), "760M": (64, 128, 256), "1.3B": (64, 128, 256, 512), "2.6B": (64, 128, 256, 512, 1024),
    "6.7B": (128, 256, 512, 1024), "15B": (128, 256, 512, 1024), "39B": (1024,),
}  # fmt: skip
_MEGATRON_39B = (Layout(4, 16, 1, 1, scatter=True), Layout(8, 8, 1, 2, scatter=True))
_SAMPLES = (1, 2, 4, 8, 16, 32)


def alpa() -> Iterator[Measurement]:
    """Alpa's GPT table: Megatron-LM, inter-op only, intra-op only on p3.16xlarge nodes."""
    for index, row in enumerate(read_table("alpa_gpt")):
        gpus, batch, name = int(row["gpus"]), 1024, row["params"]
        model = Gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]), 1024, VOCABULARY)
        nodes = f"{gpus}xV100-16GB" if gpus <= 8 else f"{gpus // 8}x8xV100-16GB@Ethernet-25"
        cluster = Cluster.parse(nodes)
        plan = row["megatron_plan_dp_tp_pp_microbatches"]
        if plan:
            dp, tp, pp, microbatches = map(int, plan.split())
            megatron: Sequence[Layout] = (Layout(tp, pp, dp, batch // dp // microbatches, scatter=True),)
        elif name == "39B":
            megatron = _MEGATRON_39B
        else:
            megatron = _fitting(model, cluster, batch)
        inter = [Layout(1, gpus, 1, batch // count, balanced=True) for count in _INTER[name]]
        inter = [layout for layout in inter if fits(model, cluster, layout, batch)] or inter[-1:]
        dp, tp, samples = _INTRA[name]
        intra = (Layout(tp, 1, dp, samples, sharded=True),)
        measured = {
            "megatron": _seconds(model, batch, gpus, row["megatron_tf"]),
            "inter": float(row["inter_s"]),
            "intra": float(row["intra_s"]),
        }
        for column, layouts in (("megatron", megatron), ("inter", inter), ("intra", intra)):
            yield Measurement(
                "alpa_gpt", column, name, model, cluster, batch, tuple(layouts), measured[column], _half(index)
            )


def _seconds(model: Gpt, batch: int, gpus: int, teraflops: str) -> float:
    return model.flops(batch) / gpus / float(teraflops) / 1e12


def _fitting(model: Gpt, cluster: Cluster, batch: int) -> list[Layout]:
    count = cluster.device_count
    found = [
        Layout(tp, pp, count // tp // pp, samples, scatter=True)
        for tp in range(1, count + 1)
        for pp in range(1, count // tp + 1)
        if count % (tp * pp) == 0 and model.layers % pp == 0
        for samples in _SAMPLES
    ]
    return [layout for layout in found if fits(model, cluster, layout, batch)]


TABLES = {"megatron_sc21_table1": sc21, "megatron_tp_only": tensor_only, "alpa_gpt": alpa}
"""Tables of which halves are fitted to."""
AS_MEASURED = ("nemo_h100", "megatron_sc21_table2", "megatron_recomputation", "nemo_gpt")
"""Tables in the form of :mod:`autopart.cost.measured`. Nothing was fitted to them but to half of the first."""

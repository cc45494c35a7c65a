"""Measured steps of GPT models as a table that anyone can write: one row for each run, with its plan.

A file of comma-separated values; lines that start with ``#`` are left out. The first line names the columns:

==================================  ==================================================================================
layers, hidden, heads               of the model
cluster                             as ``--cluster`` takes it
batch                               samples in a step
tp, pp                              degrees; replicas are what is left of the cluster
seconds, or tflops                  of a step; of a device, recomputed layers counted (SC'21, equation 3)
name                                for people
sequence, vocabulary, mlp           default 2048, 51200, four times hidden
samples, chunks                     of a microbatch on one replica, of a stage: default 1
recompute                           full (default), selective or none
scatter, overlap, sharded,          yes or no (default): see :class:`autopart.cost.training.Layout`
balanced
sequence_parallel,                  yes or no (default): see :class:`autopart.cost.gpt.Style`
fused_attention, beside
==================================  ==================================================================================
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autopart.cluster import Cluster
from autopart.cost.gpt import Gpt, Style
from autopart.cost.published import VOCABULARY, Measurement
from autopart.cost.training import Layout, step_seconds
from autopart.runtime.errors import AutopartError, InputError

_SEQUENCE = 2048
_SIZES = ("layers", "hidden", "heads", "batch", "tp", "pp")
_MORE_SIZES = ("sequence", "vocabulary", "mlp", "samples", "chunks")
_LAYOUT_FLAGS = ("scatter", "overlap", "sharded", "balanced")
_STYLE_FLAGS = ("sequence_parallel", "fused_attention", "beside")
_MEASURED = ("seconds", "tflops")
_COLUMNS = ("name", "cluster", "recompute", *_SIZES, *_MORE_SIZES, *_LAYOUT_FLAGS, *_STYLE_FLAGS, *_MEASURED)


def read_file(path: Path) -> list[Measurement]:
    """The rows of a file. Raises InputError naming the line and the column."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected is a file, a table of runs as CSV") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; expected is a table of runs as CSV") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    return read_measurements(text.splitlines(), path.stem, str(path))


def read_measurements(lines: Iterable[str], table: str, file: str) -> list[Measurement]:
    """The rows of a table, none of which the constants were fitted to. Raises InputError naming line and column."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    rows = csv.DictReader(line for _, line in numbered)
    given = rows.fieldnames or ()
    unknown = [name for name in given if name not in _COLUMNS]
    missing = [name for name in (*_SIZES, "cluster") if name not in given]
    if unknown or missing or not any(name in given for name in _MEASURED):
        said = [f"unknown columns: {', '.join(map(repr, unknown))}"] if unknown else []
        said += [f"missing columns: {', '.join(missing)}"] if missing else []
        said += ["neither seconds nor tflops"] if not any(name in given for name in _MEASURED) else []
        raise InputError(f"{file}: {'; '.join(said)}; the columns are {', '.join(_COLUMNS)}")
    found = []
    for (number, _), cells in zip(numbered[1:], rows, strict=True):
        row = _Row(f"{file}, line {number}", {name: (cell or "").strip() for name, cell in cells.items() if name})
        if None in cells:
            raise InputError(f"{row.place}: has more values than there are columns")
        found.append(row.measurement(table))
    if not found:
        raise InputError(f"{file}: has no rows")
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    """place: file and line, for errors."""

    place: str
    cells: Mapping[str, str]

    def size(self, name: str, default: int | None = None) -> int:
        text = self.cells.get(name, "")
        if not text and default is not None:
            return default
        if not text.isdecimal() or not int(text):
            raise InputError(f"{self.place}: {name} is a whole number from 1 on, not {text!r}")
        return int(text)

    def flag(self, name: str) -> bool:
        text = self.cells.get(name) or "no"
        if text not in ("yes", "no"):
            raise InputError(f"{self.place}: {name} is yes or no, not {text!r}")
        return text == "yes"

    def positive(self, name: str) -> float | None:
        text = self.cells.get(name, "")
        try:
            found = float(text) if text else None
        except ValueError:
            found = 0.0
        if found is not None and not 0 < found < float("inf"):
            raise InputError(f"{self.place}: {name} is a number above 0, not {text!r}")
        return found

    def measurement(self, table: str) -> Measurement:
        sizes = {name: self.size(name) for name in _SIZES}
        seconds, tflops = self.positive("seconds"), self.positive("tflops")
        if (seconds is None) == (tflops is None):
            raise InputError(f"{self.place}: one of seconds and tflops is given, and not both")
        try:
            model = Gpt(
                *(sizes["layers"], sizes["hidden"], sizes["heads"], self.size("sequence", _SEQUENCE)),
                *(self.size("vocabulary", VOCABULARY), self.size("mlp", 4 * sizes["hidden"])),
            )
            cluster = Cluster.parse(self.cells["cluster"])
            dp, rest = divmod(cluster.device_count, sizes["tp"] * sizes["pp"])
            if rest:
                raise InputError(f"{cluster.device_count} devices do not divide by tp x pp")
            layout = Layout(
                *(sizes["tp"], sizes["pp"], dp, self.size("samples", 1), self.size("chunks", 1)),
                recompute=self.cells.get("recompute") or "full",
                style=Style(**{name: self.flag(name) for name in _STYLE_FLAGS}),
                **{name: self.flag(name) for name in _LAYOUT_FLAGS},
            )
            step_seconds(model, cluster, layout, sizes["batch"])
        except InputError as error:
            raise InputError(str(error) if str(error).startswith(self.place) else f"{self.place}: {error}") from None
        except (AutopartError, ValueError) as error:
            raise InputError(f"{self.place}: {error}") from None
        if seconds is None:
            assert tflops is not None
            seconds = model.flops(sizes["batch"]) / cluster.device_count / tflops / 1e12
        name = self.cells.get("name") or f"{model.parameters / 1e9:.3g}B"
        return Measurement(table, "", name, model, cluster, sizes["batch"], (layout,), seconds, "test")

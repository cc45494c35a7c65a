"""Measured steps of GPT and Llama models as a table that anyone can write: one row for each run, with its plan.

A file of comma-separated values; lines that start with ``#`` are left out, and so are columns without a name that hold
nothing, as spreadsheets leave them at the end. The first line names the columns:

==================================  ==================================================================================
layers, hidden, heads               of the model
cluster                             as ``--cluster`` takes it, also a cluster file (.toml), beside this one or by its
                                    path
batch                               samples in a step
tp, pp                              degrees; replicas are what is left of the cluster
seconds, or tflops                  of a step; of a device, what runs again counted where recompute is full (SC'21,
                                    equation 3), else left out
name                                for people
half                                fit or test (default): whether constants were fitted to it, of published rows
sequence, vocabulary, mlp,          default 2048, 51200, four times hidden, heads
kv_heads
gated, untied, plain                yes or no (default): see :class:`autopart.cost.gpt.Gpt`; all three for a Llama
samples, chunks                     of a microbatch on one replica, of a stage: default 1
cp                                  ranks that share each sequence: default 1
recompute                           full (default), selective or none
scatter, overlap, sharded,          yes or no (default): see :class:`autopart.cost.training.Layout`
balanced, message_overlap
sequence_parallel,                  yes or no (default): see :class:`autopart.cost.gpt.Style`
fused_attention, beside,
tensor_overlap
==================================  ==================================================================================
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopart.cluster import Cluster
from autopart.cost.gpt import Gpt, Style
from autopart.cost.published import HALVES, VOCABULARY, Measurement
from autopart.cost.training import Layout, step_seconds
from autopart.runtime.errors import AutopartError, InputError

_SEQUENCE = 2048
_SIZES = ("layers", "hidden", "heads", "batch", "tp", "pp")
_MORE_SIZES = ("sequence", "vocabulary", "mlp", "kv_heads", "samples", "chunks", "cp")
_MODEL_FLAGS = ("gated", "untied", "plain")
_LAYOUT_FLAGS = ("scatter", "overlap", "sharded", "balanced", "message_overlap")
_STYLE_FLAGS = ("sequence_parallel", "fused_attention", "beside", "tensor_overlap")
_MEASURED = ("seconds", "tflops")
_MOST, _MOST_LAYERS, _DIGITS = 2**31, 2**16, 10
"""Of a size: more is a slip of the pen, by which no step can be priced."""
_ABOVE_PEAK = 2.0
"""Times a device's peak from which figures are in another unit; a kernel may leave out half of the attention."""
_ABOVE_PRICE = 300.0
"""Times the price from which they are too, milliseconds for one."""
_FLAGS = (*_MODEL_FLAGS, *_LAYOUT_FLAGS, *_STYLE_FLAGS)
_COLUMNS = ("name", "cluster", "recompute", *_SIZES, *_MORE_SIZES, *_FLAGS, *_MEASURED, "half")


def read_file(path: Path) -> list[Measurement]:
    """The rows of a file. Raises InputError naming the line and the column."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin with a mark
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; expected is a file, a table of runs as CSV") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; expected is a table of runs as CSV") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read: {error}; expected is text in UTF-8") from None
    return read_measurements(text.splitlines(), path.stem, str(path))


def read_measurements(lines: Iterable[str], table: str, file: str) -> list[Measurement]:
    """The rows of a table, none of which the constants were fitted to. Raises InputError naming line and column."""
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    rows = csv.DictReader(f"{line}\n" for _, line in numbered)
    try:
        # Columns without a name keep one each, of blanks.
        rows.fieldnames = [name.strip().lower() or " " * index for index, name in enumerate(rows.fieldnames or ())]
        found = list(_read(rows, numbered, table, file))
    except csv.Error as error:
        raise InputError(f"{file}: cannot be read as comma-separated values: {error}") from None
    if not found:
        raise InputError(f"{file}: has no rows")
    return found


def _read(
    rows: csv.DictReader[str], numbered: Sequence[tuple[int, str]], table: str, file: str
) -> Iterator[Measurement]:
    """numbered: the lines that are read, with their numbers in the file."""
    _check_columns(rows.fieldnames or (), file)
    for cells in rows:
        number, _ = numbered[rows.line_num - 1]  # a quoted cell may go over several lines
        if None in cells:
            raise InputError(f"{file}, line {number}: has more values than there are columns")
        own = {name: " ".join((cell or "").split()) for name, cell in cells.items()}
        if any(cell and not name.strip() for name, cell in own.items()):
            raise InputError(f"{file}, line {number}: has a value in a column without a name")
        yield _Row(f"{file}, line {number}", own, Path(file).parent).measurement(table)


def _check_columns(given: Sequence[str], file: str) -> None:
    for separator, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(given) == 1 and separator in given[0]:
            raise InputError(f"{file}: values are separated by commas, not by {name}")
    unknown = [name for name in given if name.strip() and name not in _COLUMNS]
    twice = [name for name, count in Counter(given).items() if count > 1]
    missing = [name for name in (*_SIZES, "cluster") if name not in given]
    said = [f"unknown columns: {', '.join(map(repr, unknown))}"] if unknown else []
    said += [f"columns that are there twice: {', '.join(twice)}"] if twice else []
    said += [f"missing columns: {', '.join(missing)}"] if missing else []
    said += ["neither seconds nor tflops"] if not any(name in given for name in _MEASURED) else []
    if said:
        raise InputError(f"{file}: {'; '.join(said)}; the columns are {', '.join(_COLUMNS)}")


@dataclass(frozen=True, slots=True)
class _Row:
    """place: file and line, for errors. folder: of the file."""

    place: str
    cells: Mapping[str, str]
    folder: Path

    def size(self, name: str, default: int | None = None) -> int:
        text = self.cells.get(name, "")
        if not text and default is not None:
            return default
        most = _MOST_LAYERS if name == "layers" else _MOST
        if not text.isdecimal() or len(text) > _DIGITS or not 1 <= int(text) <= most:
            shown = text if len(text) <= 40 else f"{text[:40]}…"
            raise InputError(f"{self.place}: {name} is a whole number from 1 to {most:,}, not {shown!r}")
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
                self.size("kv_heads", sizes["heads"]),
                **{name: self.flag(name) for name in _MODEL_FLAGS},
            )
            beside = self.folder / self.cells["cluster"]
            cluster = Cluster.load(beside) if beside.is_file() else Cluster.read(self.cells["cluster"])
            cp = self.size("cp", 1)
            dp, rest = divmod(cluster.device_count, sizes["tp"] * sizes["pp"] * cp)
            if rest:
                raise InputError(f"{cluster.device_count} devices do not divide by tp x pp{' x cp' if cp > 1 else ''}")
            if model.heads % sizes["tp"]:
                raise InputError(
                    f"heads are divided among tensor ranks, but {model.heads} is no multiple of {sizes['tp']}"
                )
            layout = Layout(
                *(sizes["tp"], sizes["pp"], dp, self.size("samples", 1), self.size("chunks", 1)),
                recompute=self.cells.get("recompute") or "full",
                style=Style(**{name: self.flag(name) for name in _STYLE_FLAGS}),
                cp=cp,
                **{name: self.flag(name) for name in _LAYOUT_FLAGS},
            )
            priced = step_seconds(model, cluster, layout, sizes["batch"]).total
            _check_units(model, cluster, sizes["batch"], seconds, tflops)
            if (seconds or 0.0) > _ABOVE_PRICE * priced:
                raise InputError(
                    f"{seconds:.4g} s are far beyond the {priced:.3g} s that it is priced at: is it milliseconds?"
                )
        except InputError as error:
            raise InputError(str(error) if str(error).startswith(self.place) else f"{self.place}: {error}") from None
        except (AutopartError, ValueError) as error:
            raise InputError(f"{self.place}: {error}") from None
        if seconds is None:
            assert tflops is not None
            done = model.flops(sizes["batch"], recompute=layout.recompute == "full")
            seconds = done / cluster.device_count / tflops / 1e12
        name, half = self.cells.get("name") or f"{model.parameters / 1e9:.3g}B", self.cells.get("half") or "test"
        if half not in HALVES:
            raise InputError(f"{self.place}: half is one of {', '.join(HALVES)}, not {half!r}")
        return Measurement(table, "", name, model, cluster, sizes["batch"], (layout,), seconds, half)


def _check_units(model: Gpt, cluster: Cluster, batch: int, seconds: float | None, tflops: float | None) -> None:
    """Raises InputError where what was measured is far beyond what devices can do."""
    best = max(cluster.devices, key=lambda device: max(device.peak_flops.values()))
    peak = max(best.peak_flops.values()) / 1e12
    done = tflops or model.flops(batch, recompute=False) / cluster.device_count / (seconds or 1.0) / 1e12
    if done > _ABOVE_PEAK * peak:
        raise InputError(
            f"{done:.4g} TFLOP/s on each device is beyond {best.name}, which reaches {peak:.4g} at most: tflops are "
            "10^12 FLOP/s of one device, seconds those of a whole step"
        )

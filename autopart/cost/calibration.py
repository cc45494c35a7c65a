"""The cost model's parameters fitted to measurements of one machine, and how well they hold on what was kept aside.

Fitted are the parameters of a :class:`Device` and a :class:`Link` that a measurement can see: the FLOP/s that large
matrix products reach by type, the bytes/s of memory-bound ops, the seconds of a launch, the share of the matrix
products' rate that fused attention reaches by type, forward and back, what the host takes to start an op in training,
bandwidth and latency of the link; of a GPU also the share of the rate that products reach whose rows are not aligned,
of a CPU the seconds of an element's exponential, of a random number, and of a large new tensor's byte. Measured rates
take the place of datasheets' peaks times shares, so that the fitted device's other shares are 1.

The fit is the minimum over the samples that are not kept aside of ::

    sum_s (sqrt(1 + (log(predicted_s / measured_s) / DELTA)^2) - 1)

which counts small errors squared and large ones, a disturbed measurement's, by their size (pseudo-Huber). It is found
by coordinate descent in the logarithms: each parameter touches few samples and the sum is smooth nearly everywhere.

Where other work disturbs many samples, one parameter can explain what is another's: with little bandwidth all products
are bound by memory, and any rate of theirs, 1e25 FLOP/s too, fits as well as the next. No rate is taken for more than
BEYOND times what some sample reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, inf, log, sqrt
from statistics import median
from typing import Any

from autopart.cost.devices import Device, Link, number
from autopart.cost.samples import ATTENTION, HOST, KERNELS, LAUNCH, PRODUCT, STREAM, Sample, predicted_seconds
from autopart.runtime.errors import ClusterError

VERSION = 4
DELTA = 0.3
BEYOND = 2.0
"""Times the fastest that was measured, which small tiles, launches and latencies may have held up."""
MOST_OFF = 0.5
"""The median error on samples kept aside from which a fit says little of the machine."""
_RATE, _HOST_S, _UNALIGNED, _BACK = "rate", "host_s", "unaligned", "attention_back"
_COUNTED = {"function_s": "functions", "random_s": "drawn", "mapped_s": "mapped"}
"""Parameters of CPUs, by what of a sample counts for them."""
_FIRST_STEP, _LAST_STEP, _GROWTH = 0.5, 1e-4, 1.5
_ROUNDS = 300


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far predictions of one kind of sample are off, as shares of the measured seconds.

    samples, median, largest: of those that were kept aside; fitted, fit_median: of the others.
    """

    kind: str
    samples: int
    median: float
    largest: float
    fitted: int
    fit_median: float


def doubts(rows: Iterable[Accuracy]) -> tuple[str, ...]:
    """What is said of a fit that is far off on what was kept aside; nothing of a good one."""
    far = [f"{row.median:.0%} of {row.kind.replace('_', '-')}" for row in rows if row.median > MOST_OFF]
    if not far:
        return ()
    return (
        f"the median error on what was kept aside is {', '.join(far)}, more than {MOST_OFF:.0%}: either the machine "
        "was busy with other work, and should be calibrated again when it is idle, or the model does not hold there; "
        "plans for it use what was measured",
    )


@dataclass(frozen=True, slots=True)
class Calibration:
    """One machine under one load.

    device: as its driver or operating system names it. kind: "cpu" or "cuda". processes: ranks per host that measured
    at once; threads: of each; cores: of the host. libraries: versions by name. rates: FLOP/s by type. attention: the
    share of these that fused attention reaches, by type, and attention_back in its backward. link: None where one rank
    measured alone. launch_s: of an op by itself; host_s: of one in training, where it takes longer than the device
    does. unaligned, function_s, random_s, mapped_s: as of a :class:`Device`.
    """

    device: str
    kind: str
    processes: int
    threads: int
    cores: int
    libraries: Mapping[str, str] = field(hash=False)
    rates: Mapping[str, float] = field(hash=False)
    memory_bandwidth: float
    launch_s: float
    attention: Mapping[str, float] = field(hash=False)
    link: Link | None
    samples: tuple[Sample, ...] = ()
    host_s: float = 0.0
    unaligned: float = 1.0
    function_s: float = 0.0
    random_s: float = 0.0
    mapped_s: float = 0.0
    attention_back: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        positive = [self.memory_bandwidth, self.launch_s, *self.rates.values()]
        positive += [*self.attention.values(), *self.attention_back.values(), self.unaligned]
        sound = all(0 < value < inf for value in positive)
        sound = sound and all(
            0 <= value < inf for value in (self.host_s, self.function_s, self.random_s, self.mapped_s)
        )
        sound = sound and min(self.processes, self.threads, self.cores) >= 1
        if "float32" not in self.rates or not sound:
            numbers = {name: value for name, value in asdict(self).items() if name not in ("samples", "link")}
            raise ClusterError(
                f"a calibration has finite numbers above zero, a rate for float32 among them, not {numbers}"
            )

    def applied(self, device: Device, processes: int) -> Device:
        """``device`` with what was measured, for a host that runs that many ranks.

        A CPU's ranks share its cores: where their number is another than when measuring, each gets its part of what
        all cores reach together, launches and random numbers take turns on cores that are fewer than ranks, and a rank
        has one thread, as in jobs. An op takes its host what it takes in training, at least.
        """
        share = launches = alone = 1.0
        if self.kind == "cpu":
            busy = min(self.cores, self.processes * self.threads)
            share = (self.processes / busy) * (self.cores / processes) if processes != self.processes else 1.0
            launches = max(1.0, processes / self.cores) / max(1.0, self.processes / self.cores)
            threads = self.threads if processes == self.processes else 1
            alone = max(1.0, min(threads, self.cores) * processes / self.cores)
        rates = {name: rate * share for name, rate in self.rates.items()}
        for name in device.peak_flops:  # types that were not measured keep their relation to float32
            rates.setdefault(name, rates["float32"] * device.product_rate(name) / device.product_rate("float32"))
        is_host = self.kind == "cpu"  # which computes ops itself
        return replace(
            device,
            peak_flops=rates,
            memory_bandwidth=self.memory_bandwidth * share,
            launch_s=(max(self.launch_s, self.host_s) if is_host else self.launch_s) * launches,
            contraction=1.0,
            contraction_by={},
            memory=1.0,
            attention_by=self.attention,
            host_s=0.0 if is_host else self.host_s,
            unaligned=self.unaligned,
            function_s=self.function_s / share,
            random_s=self.random_s * launches,
            mapped_s=self.mapped_s / share,
            attention_back_by=self.attention_back,
            alone=alone,
            measured=self.processes,
        )

    def accuracy(self, device: Device) -> tuple[Accuracy, ...]:
        """By kind of sample. device: the preset that the calibration is applied to."""
        fitted = replace(self.applied(device, self.processes), launch_s=self.launch_s, host_s=self.host_s)
        found = []
        for kind in dict.fromkeys(sample.kind for sample in self.samples):
            errors: dict[bool, list[float]] = {True: [], False: []}
            for sample in self.samples:
                if sample.kind == kind:
                    off = abs(predicted_seconds(sample, fitted, self.link) / sample.seconds - 1)
                    errors[sample.held].append(off)
            held, used = errors[True], errors[False]
            found.append(Accuracy(kind, len(held), _median(held), max(held, default=0.0), len(used), _median(used)))
        return tuple(found)

    def to_json_object(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            **{name: value for name, value in asdict(replace(self, samples=())).items() if name != "samples"},
            "samples": [sample.to_json_object() for sample in self.samples],
        }

    @staticmethod
    def from_json_object(data: Mapping[str, Any]) -> Calibration:
        """Reads what :meth:`to_json_object` gives. Raises ClusterError where something is missing or wrong."""
        if data.get("version") != VERSION:
            raise ClusterError(f"a calibration of version {data.get('version')!r}, this autopart reads {VERSION}")
        fields = {name: value for name, value in data.items() if name != "version"}
        try:
            _check_kinds(fields)
            link = Link(**fields["link"]) if fields["link"] is not None else None
            samples = tuple(Sample.from_json_object(item) for item in fields["samples"])
            found = Calibration(**{**fields, "link": link, "samples": samples})
            found.applied(_plain(found), found.processes)  # a device and its shares are checked when it is made
        except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            raise ClusterError(f"not a calibration: {type(error).__name__}: {error}") from error
        return found


def _check_kinds(fields: Mapping[str, Any]) -> None:
    """Raises TypeError, KeyError, ValueError or AttributeError where a field is of another kind than it is written."""
    for text in (fields["device"], fields["kind"], *fields["libraries"].values()):
        if not isinstance(text, str):
            raise TypeError(f"expected text, found {text!r}")
    for count in (fields["processes"], fields["threads"], fields["cores"]):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"expected a whole number, found {count!r}")
    link = {name: value for name, value in (fields["link"] or {}).items() if name != "name"}
    for values in (fields["rates"], fields["attention"], fields["attention_back"], link):
        for value in values.values():
            number(value)
    for name in ("memory_bandwidth", "launch_s", "host_s", "unaligned", *_COUNTED):
        number(fields[name])


def _plain(found: Calibration) -> Device:
    return Device("any", found.kind, 1, {"float32": 1.0}, 1.0, 0.0)


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """device, link: with fitted parameters and shares of 1; link is None where there are no collectives."""

    device: Device
    link: Link | None


def fit(samples: Iterable[Sample], device: Device, link_name: str = "measured") -> Fit:
    """The parameters that explain the samples which are not kept aside best.

    device: gives what no measurement shows, its name, memory and number of multiprocessors. Raises ClusterError where
    a parameter has no sample.
    """
    used = [sample for sample in samples if not sample.held]
    by_kind: dict[str, list[Sample]] = {}
    for sample in used:
        by_kind.setdefault(sample.kind if sample.kind in KERNELS else "link", []).append(sample)
    for kind in (PRODUCT, STREAM, LAUNCH):
        if kind not in by_kind:
            raise ClusterError(f"cannot fit: no sample of kind {kind} was measured")
    model = _Model(used, _start(by_kind, device), device, link_name, _most(by_kind))
    model.descend()
    return Fit(*model.built(model.values))


def _start(by_kind: Mapping[str, Sequence[Sample]], device: Device) -> dict[str, float]:
    """First values, each from the samples that show it most directly."""
    launch = min(sample.seconds / sample.launches for sample in by_kind[LAUNCH])
    streams = [sample for sample in by_kind[STREAM] if sample.seconds > 2 * launch] or by_kind[STREAM]
    found = {
        "launch_s": launch,
        "memory_bandwidth": median(sample.num_bytes / sample.seconds for sample in streams),
    }
    for dtype in dict.fromkeys(sample.dtype for sample in by_kind[PRODUCT]):
        rates = [
            sum(product.flops for product in sample.products) / sample.seconds
            for sample in by_kind[PRODUCT]
            if sample.dtype == dtype and sample.is_aligned
        ]
        found[f"{_RATE} {dtype}"] = sorted(rates)[len(rates) * 3 // 4]
    if "float32" not in device.peak_flops or f"{_RATE} float32" not in found:
        raise ClusterError("cannot fit: no matrix product in float32 was measured")
    for dtype in dict.fromkeys(sample.dtype for sample in by_kind.get(ATTENTION, ())):
        found[f"{ATTENTION} {dtype}"] = device.attention
        if any(product.back for sample in by_kind[ATTENTION] if sample.dtype == dtype for product in sample.products):
            found[f"{_BACK} {dtype}"] = device.attention
    for name, what in _COUNTED.items():
        shown = [sample.seconds / getattr(sample, what) for sample in by_kind[STREAM] if getattr(sample, what)]
        if shown:
            found[name] = median(shown) / 2
    if HOST in by_kind:
        found[_HOST_S] = median(sample.seconds / sample.launches for sample in by_kind[HOST])
    if not all(sample.is_aligned for sample in by_kind[PRODUCT]):
        found[_UNALIGNED] = device.unaligned
    if "link" in by_kind:
        collectives = by_kind["link"]
        found["bandwidth"] = max(sample.num_bytes / sample.seconds for sample in collectives)
        found["latency_s"] = min(sample.seconds for sample in collectives) / 2
    return found


def _most(by_kind: Mapping[str, Sequence[Sample]]) -> dict[str, float]:
    """The rates above which no sample says anything, by parameter."""
    fastest: dict[str, float] = {}
    for sample in by_kind[PRODUCT]:
        rate = sum(product.flops for product in sample.products) / sample.seconds
        name = f"{_RATE} {sample.dtype}"
        fastest[name] = max(rate, fastest.get(name, 0.0))
    fastest["memory_bandwidth"] = max(sample.num_bytes / sample.seconds for sample in by_kind[STREAM])
    if "link" in by_kind:  # a sum goes around a ring twice
        fastest["bandwidth"] = 2 * max(sample.num_bytes / sample.seconds for sample in by_kind["link"])
    return {name: BEYOND * rate for name, rate in fastest.items()}


def _by_dtype(values: Mapping[str, float], what: str) -> dict[str, float]:
    return {name.partition(" ")[2]: value for name, value in values.items() if name.partition(" ")[0] == what}


@dataclass(slots=True)
class _Model:
    """The sum to be minimised, and its parameters by name. most: what they are at most, where that is known."""

    samples: Sequence[Sample]
    values: dict[str, float]
    device: Device
    link_name: str
    most: Mapping[str, float]

    def built(self, values: Mapping[str, float]) -> tuple[Device, Link | None]:
        rates, shares, back = (_by_dtype(values, what) for what in (_RATE, ATTENTION, _BACK))
        device = replace(
            self.device,
            peak_flops=rates,
            memory_bandwidth=values["memory_bandwidth"],
            launch_s=values["launch_s"],
            contraction=1.0,
            contraction_by={},
            memory=1.0,
            attention_by={dtype: min(1.0, share) for dtype, share in shares.items()},
            host_s=values.get(_HOST_S, self.device.host_s),
            unaligned=min(1.0, values.get(_UNALIGNED, self.device.unaligned)),
            **{name: values.get(name, getattr(self.device, name)) for name in _COUNTED},
            attention_back_by={dtype: min(1.0, share) for dtype, share in back.items()},
        )
        if "bandwidth" not in values:
            return device, None
        link = Link(self.link_name, values["bandwidth"], values["latency_s"], efficiency=1.0)
        return device, link.of_gloo() if self.device.kind == "cpu" else link

    def loss(self, values: Mapping[str, float], samples: Sequence[Sample]) -> float:
        device, link = self.built(values)
        errors = (log(predicted_seconds(sample, device, link) / sample.seconds) / DELTA for sample in samples)
        return sum(sqrt(1 + error * error) - 1 for error in errors)

    def touched(self, name: str) -> list[Sample]:
        """The samples whose prediction a parameter can change."""
        if name in ("bandwidth", "latency_s"):
            return [sample for sample in self.samples if sample.is_collective]
        if name == _HOST_S:
            return [sample for sample in self.samples if sample.kind == HOST]
        kernels = [sample for sample in self.samples if not sample.is_collective and sample.kind != HOST]
        if name == _UNALIGNED:
            return [sample for sample in kernels if not sample.is_aligned]
        if name in _COUNTED:
            return [sample for sample in kernels if getattr(sample, _COUNTED[name])]
        what, _, dtype = name.partition(" ")
        if what not in (_RATE, ATTENTION, _BACK):
            return kernels
        kinds = KERNELS if what == _RATE else (ATTENTION,)
        return [item for item in kernels if item.products and item.dtype == dtype and item.kind in kinds]

    def descend(self) -> None:
        """Tries each parameter larger and smaller by a step, which grows where that helps and shrinks where not."""
        touched = {name: self.touched(name) for name in self.values}
        steps = dict.fromkeys(self.values, _FIRST_STEP)
        for _ in range(_ROUNDS):
            for name, step in steps.items():
                now = self.loss(self.values, touched[name])
                ways = (self.values[name] * factor for factor in (exp(step), exp(-step)))
                tried = [{**self.values, name: min(value, self.most.get(name, inf))} for value in ways]
                least, best = min(((self.loss(item, touched[name]), item) for item in tried), key=lambda pair: pair[0])
                if least < now:
                    self.values, steps[name] = best, min(_FIRST_STEP, _GROWTH * step)
                else:
                    steps[name] = step / 2
            if max(steps.values()) < _LAST_STEP:
                return

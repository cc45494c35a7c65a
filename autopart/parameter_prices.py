"""What the parameters of a program take of a rank: bytes held, and seconds at the end of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.analysis import Analysis
from autopart.cost.devices import Link
from autopart.data_prices import held_bytes
from autopart.message_memory import single_bytes, staying_bytes
from autopart.passes.annotate import ParameterBytes, parameter_bytes
from autopart.passes.data_axis import data_dim
from autopart.passes.program import TensorInfo
from autopart.prices import share_of
from autopart.runtime.placement import BROADCAST, REPLICATE, Placements
from autopart.runtime.written_buffers import COPIES
from autopart.solver.overlap import GradientSum
from autopart.solver.stages_parts import TiedGroup
from autopart.solver.stages_passing import Passing, passing
from autopart.tensor_choice import TensorChoice
from autopart.tensor_setting import Setting
from autopart.tied_sums import tied_seconds
from autopart.update_memory import at_once, temporaries


@dataclass(frozen=True, slots=True)
class ParameterPrice:
    """Of one parameter or buffer.

    step_end_s: gradient sums and the optimizer. sum_s: of these the sum over replicas that starts during the last
    backward, in messages of what is equal in ``kind``; sum_bytes: by which these are filled. first: whether replicas
    cut it in its first dim, if they do.
    """

    held: ParameterBytes
    step_end_s: float
    sum_s: float
    sum_bytes: float
    kind: Hashable
    first: bool = True

    @staticmethod
    def of(
        info: TensorInfo, storage: Mapping[str, Placements], setting: Setting, optimizer: str, level: int = 0
    ) -> ParameterPrice:
        """storage: by name, of the tensor axes. level: of ZeRO."""
        placements = storage.get(info.name, (REPLICATE,) * len(setting.axes))
        share = share_of(placements, setting.sizes)
        whole = parameter_bytes(info.shape, info.dtype, optimizer, info.trainable)
        held = ParameterBytes(
            round(whole.weight * share), round(whole.gradient * share), round(whole.optimizer * share)
        )
        own = held_bytes(held, level, setting.dp)
        if not info.trainable:
            return ParameterPrice(own, 0.0, 0.0, 0.0, None)
        seconds = setting.step_end_seconds(whole.weight, placements, level)
        partial = tuple(placement == BROADCAST for placement in placements)
        sum_s = setting.data.sum_seconds(whole.weight * share, level) if setting.dp > 1 else 0.0
        first = data_dim(info, placements, setting.named_sizes, setting.dp) == 0
        return ParameterPrice(own, seconds, sum_s, whole.weight * share, (info.dtype, level, partial), first)


@dataclass(slots=True)
class BlockParameters:
    """What a block's own parameters take.

    late_bytes: of messages, from its last backward to the end of the step. made_bytes: while a message is made of one
    large gradient. waiting_bytes: gradients that wait for readers before it, where one stage has all.
    """

    state_bytes: float = 0.0
    step_end_s: float = 0.0
    late_bytes: float = 0.0
    made_bytes: float = 0.0
    waiting_bytes: float = 0.0

    @property
    def passing_bytes(self) -> float:
        """While it goes back."""
        return self.made_bytes + self.waiting_bytes


@dataclass(frozen=True, slots=True)
class PricedParameters:
    """private: per block what its own parameters take. tied: those of several blocks. sums: of the seconds at a step's
    end those that start during the last backward, in the order of messages. passing: what is held for a while.
    """

    private: Sequence[BlockParameters]
    tied: tuple[TiedGroup, ...]
    sums: tuple[GradientSum, ...]
    passing: Passing


def priced_parameters(
    analysis: Analysis,
    readers: Mapping[fx.Node, tuple[int, ...]],
    choice: TensorChoice,
    setting: Setting,
    optimizer: str,
    between: Link | None,
    limit: float,
    versions: int = 1,
    repeats: bool = True,
    late: bool = True,
    alone: bool = False,
) -> PricedParameters:
    """readers: the blocks that read each. between: where gradients of several stages are summed; None: one stage.
    limit: bytes that fill a message. versions: of the weights, beside which as many gradients are held. repeats:
    there are several microbatches. late: what messages leave comes as what the last one keeps goes. alone: one stage
    has all blocks.
    """
    private = [BlockParameters() for _ in analysis.blocks]
    tied: list[TiedGroup] = []
    sums: dict[str, GradientSum] = {}
    known: dict[object, ParameterPrice] = {}
    updated_buffers = {*analysis.program.updated_buffers}
    sent: list[tuple[tuple[int, ...], Hashable, int, float, bool]] = []
    waiting: list[tuple[tuple[int, ...], float]] = []
    trained: dict[str, tuple[tuple[int, ...], float]] = {}
    for node, found in readers.items():
        info = analysis.program.tensors[node.meta["name"]]
        level = choice.levels.get(info.name, 0)
        alike = (info.shape, info.dtype, info.trainable, choice.storage.get(info.name), level)
        if alike not in known:
            known[alike] = ParameterPrice.of(info, choice.storage, setting, optimizer, level)
        price = known[alike]
        kept = price.held.total + (COPIES * price.held.weight if info.name in updated_buffers else 0)
        stays = 0.0
        if price.kind is not None and (setting.dp > 1 or BROADCAST in choice.storage.get(info.name, ())):
            sent.append((found, price.kind, level, price.sum_bytes, price.first))
            stays = staying_bytes(level, price.sum_bytes, setting.dp, setting.summed)
            for index in found[:1] if alone else found:  # the backward's last
                if level == 3 and analysis.layers[index]:
                    continue
                made_bytes = single_bytes(level, price.sum_bytes, price.first, setting.summed, limit)
                private[index].made_bytes = max(private[index].made_bytes, made_bytes)
        waits = len(found) > 1 and price.kind is not None and (level == 2 or (level < 2 and repeats))
        if waits and alone:
            for own in private[found[0] : found[-1]]:
                own.waiting_bytes += price.sum_bytes
        elif waits:
            waiting.append((found, price.sum_bytes))
        if price.kind is not None:
            trained[info.name] = found, price.sum_bytes / (setting.dp if level else 1)
        if price.sum_s:
            call_s = setting.data.call_seconds(level)
            sums[info.name] = GradientSum(found, price.sum_bytes, price.sum_s, price.kind, call_s)
        if len(found) == 1:
            own = private[found[0]]
            own.state_bytes += kept + (versions - 1) * (price.held.weight + price.held.gradient)
            own.step_end_s += price.step_end_s
            if late:
                own.late_bytes += stays
            else:
                own.state_bytes += stays
            continue
        seconds = 0.0
        if price.held.gradient and between is not None:
            copies = 1 if level else setting.dp
            size = price.sum_bytes * setting.summed / (setting.dp if level else 1)
            seconds = tied_seconds(size, 2, between, copies, setting.data.link)
        tied.append(TiedGroup(info.name, found, kept + stays, seconds, price.step_end_s))
    # messages take the parameters from the last to the first
    in_order = tuple(sums[info.name] for info in reversed(analysis.program.parameters) if info.name in sums)
    together = at_once(setting.prices.device.kind)
    made, before = temporaries(optimizer), 0.0
    updated: list[tuple[tuple[int, ...], float]] = []
    for info in analysis.program.parameters:
        if info.name in trained:
            found, size = trained[info.name]
            updated.append((found, made.together * size if together else made.own * size + made.before * before))
            before = size
    lingering = _lingering(sent, setting, analysis.layers) if repeats and not alone else {}
    exchanged = setting.dp, setting.summed
    held = passing(sent, updated, *exchanged, not together, limit, analysis.layers, waiting, lingering)
    return PricedParameters(private, tuple(tied), in_order, held)


def _lingering(
    sent: Sequence[tuple[tuple[int, ...], Hashable, int, float, bool]], setting: Setting, layers: Sequence[str]
) -> dict[int, float]:
    """Of level 3, of whose messages one at a time is on its way: by block that reads some what is sent of these, of
    which that counts with which a stage begins. 0 for a layer's block: of a stage that begins with a layer it is no
    more than that takes (:func:`data_prices.whole_bytes`).
    """
    found: dict[int, float] = {}
    for blocks, _, level, size, _ in sent:
        for block in blocks if level == 3 else ():
            message = 0.0 if layers[block] else setting.summed * (1 + 1 / setting.dp) * size
            found[block] = found.get(block, 0.0) + message
    return found

"""What the parameters of a program take of a rank: bytes held, and seconds at the end of a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopart.analysis import Analysis
from autopart.cost.communication import bucketed_all_reduce_seconds
from autopart.cost.devices import Link
from autopart.data_prices import held_bytes
from autopart.message_memory import staying_bytes
from autopart.passes.annotate import ParameterBytes, parameter_bytes
from autopart.passes.data_axis import data_dim
from autopart.passes.program import TensorInfo
from autopart.prices import share_of
from autopart.runtime.placement import BROADCAST, REPLICATE, Placements
from autopart.solver.overlap import GradientSum
from autopart.solver.stages_parts import TiedGroup
from autopart.solver.stages_passing import Passing, passing
from autopart.tensor_choice import Setting, TensorChoice
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


@dataclass(frozen=True, slots=True)
class PricedParameters:
    """private: per block the bytes of its own parameters and the seconds of their step end. tied: those of several
    blocks. sums: of all these seconds those that start during the last backward, in the order of messages. passing:
    what is held for a while; what stays of messages is with the parameters.
    """

    private: Sequence[tuple[float, float]]
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
) -> PricedParameters:
    """readers: the blocks that read each. between: where gradients of several stages are summed; None: one stage.
    limit: bytes that fill a message. versions: of the weights, beside which as many gradients are held.
    """
    private = [[0.0, 0.0] for _ in analysis.blocks]
    tied: list[TiedGroup] = []
    sums: dict[str, GradientSum] = {}
    known: dict[object, ParameterPrice] = {}
    sent: list[tuple[tuple[int, ...], Hashable, int, float, bool]] = []
    trained: dict[str, tuple[tuple[int, ...], float]] = {}
    for node, found in readers.items():
        info = analysis.program.tensors[node.meta["name"]]
        level = choice.levels.get(info.name, 0)
        alike = (info.shape, info.dtype, info.trainable, choice.storage.get(info.name), level)
        if alike not in known:
            known[alike] = ParameterPrice.of(info, choice.storage, setting, optimizer, level)
        price = known[alike]
        stays = 0.0
        if price.kind is not None and (setting.dp > 1 or BROADCAST in choice.storage.get(info.name, ())):
            sent.append((found, price.kind, level, price.sum_bytes, price.first))
            stays = staying_bytes(level, price.sum_bytes, setting.dp, setting.summed)
        if price.kind is not None:
            trained[info.name] = found, price.sum_bytes / (setting.dp if level else 1)
        if price.sum_s:
            call_s = setting.data.call_seconds(level)
            sums[info.name] = GradientSum(found, price.sum_bytes, price.sum_s, price.kind, call_s)
        if len(found) == 1:
            (index,) = found
            private[index][0] += price.held.total + (versions - 1) * (price.held.weight + price.held.gradient) + stays
            private[index][1] += price.step_end_s
            continue
        seconds = 0.0
        if price.held.gradient and between is not None:
            seconds = bucketed_all_reduce_seconds(price.held.gradient * setting.summed, 2, between)
        tied.append(TiedGroup(info.name, found, price.held.total + stays, seconds, price.step_end_s))
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
    held = passing(sent, updated, setting.dp, setting.summed, not together, limit, analysis.layers)
    return PricedParameters([(size, seconds) for size, seconds in private], tuple(tied), in_order, held)

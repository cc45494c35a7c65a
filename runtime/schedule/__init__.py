"""Schedules: lists of actions (actions.py), the named ones (a file per idea), passes over them (exchanges.py)."""

from autopart.runtime.schedule.actions import Action, Edges, Schedule, Work
from autopart.runtime.schedule.exchanges import (
    Step,
    backward_part,
    forward_part,
    post_receives_early,
    with_exchanges,
)
from autopart.runtime.schedule.flushing import deeper_warmup, forward_only, gpipe, one_f_one_b
from autopart.runtime.schedule.interleaving import interleaved, looped
from autopart.runtime.schedule.named import NAMES, SPLIT_SCHEDULES, VIRTUAL, in_flight, make_schedule, places_of
from autopart.runtime.schedule.zero_bubble import v_shaped, zb_h1, zb_v

__all__ = [
    "NAMES",
    "SPLIT_SCHEDULES",
    "VIRTUAL",
    "Action",
    "Edges",
    "Schedule",
    "Step",
    "Work",
    "backward_part",
    "deeper_warmup",
    "forward_only",
    "forward_part",
    "gpipe",
    "in_flight",
    "interleaved",
    "looped",
    "make_schedule",
    "one_f_one_b",
    "places_of",
    "post_receives_early",
    "v_shaped",
    "with_exchanges",
    "zb_h1",
    "zb_v",
]

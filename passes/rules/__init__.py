"""What each op allows: one line of factors per op, and the sharding strategies that follow from it."""

from autopart.passes.rules.applied import Strategy, called, compatible, local_forms, localized
from autopart.passes.rules.book import RuleBook, flops, name_of
from autopart.passes.rules.joint import joint_strategies
from autopart.passes.rules.matching import factor_of, follow, is_differentiable
from autopart.passes.rules.notation import Annotation, LocalForm, Message, Panels, Rule, RuleError
from autopart.passes.rules.routed import with_routings
from autopart.passes.rules.routing import Routing, find_routings
from autopart.passes.rules.strategies import Strategies, bound_rules, strategies
from autopart.passes.rules.table import RULES, default_rules

__all__ = [
    "RULES",
    "Annotation",
    "LocalForm",
    "Message",
    "Panels",
    "Routing",
    "Rule",
    "RuleBook",
    "RuleError",
    "Strategies",
    "Strategy",
    "bound_rules",
    "called",
    "compatible",
    "default_rules",
    "factor_of",
    "find_routings",
    "flops",
    "follow",
    "is_differentiable",
    "joint_strategies",
    "local_forms",
    "localized",
    "name_of",
    "strategies",
    "with_routings",
]

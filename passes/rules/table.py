"""The rules that autopart comes with."""

from __future__ import annotations

from autopart.passes.rules import (
    table_contractions,
    table_distances,
    table_elementwise,
    table_indexing,
    table_losses,
    table_matrices,
    table_norms,
    table_recurrent,
    table_reductions,
    table_shape,
    table_spectral,
)
from autopart.passes.rules.book import RuleBook
from autopart.passes.rules.localize import localizers


def default_rules() -> RuleBook:
    """A book of all built-in rules; extend it with :meth:`RuleBook.extended`."""
    tables = (
        table_contractions,
        table_distances,
        table_elementwise,
        table_indexing,
        table_losses,
        table_matrices,
        table_norms,
        table_recurrent,
        table_reductions,
        table_shape,
        table_spectral,
    )
    merged = {name: entry for module in tables for name, entry in module.table().items()}
    assert len(merged) == sum(len(module.table()) for module in tables), "an op has rules in two tables"
    return RuleBook(merged, localizers())


RULES = default_rules()

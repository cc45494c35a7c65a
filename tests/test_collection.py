"""Garbage collection while planning: put off, and as it was before afterwards."""

import gc

import pytest

from autopart.collection import seldom_collected


def test_collections_wait_and_then_go_on_as_before() -> None:
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0
        with seldom_collected():
            pass
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0, "the outer one's objects are left alone still"
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_process_that_collects_nothing_goes_on_so() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with seldom_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_errors_leave_nothing_changed() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="wrong"), seldom_collected():
        raise ValueError("wrong")
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_a_process_has_frozen_stays_so_and_nothing_else() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        made = [[index] for index in range(1000)]
        with seldom_collected():
            assert gc.get_freeze_count() <= count, f"{len(made)} new ones are not frozen"
        assert gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()

"""The configurations that the outer search is given."""

from __future__ import annotations

import pytest

from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees, degrees, factorizations, read_axes


@pytest.mark.parametrize("devices", [1, 2, 6, 7, 12, 64, pytest.param(96, marks=pytest.mark.slow)])
def test_degrees_are_all_that_match(devices: int) -> None:
    batch = 24
    found = degrees(devices, batch, schedules=(("1f1b", 1), ("gpipe", 1)))
    expected = {
        (pp, dp, tp, count, schedule)
        for pp in range(1, devices + 1)
        for dp in range(1, devices + 1)
        for tp in range(1, devices + 1)
        for count in range(1, batch + 1)
        for schedule in ("1f1b", "gpipe")
        if pp * dp * tp == devices and batch % (dp * count) == 0
    }
    assert {(d.pp, d.dp, d.tp, d.microbatches, d.schedule) for d in found} == expected
    assert len(found) == len(expected) and all(d.devices == devices for d in found)


def test_forced_values_and_limits() -> None:
    found = degrees(64, 32, pp=4, microbatches=8, max_tp=4)
    assert found and all((d.pp, d.microbatches) == (4, 8) and d.tp <= 4 for d in found)
    assert {d.recompute for d in found} == {"auto"}
    assert {d.recompute for d in degrees(4, 4, recompute="full")} == {"full"}
    assert all(d.pp <= 2 for d in degrees(64, 32, max_pp=2))


def test_tensor_axes_are_factorizations_in_every_order() -> None:
    assert factorizations(8, 1) == ((8,),)
    assert factorizations(8, 3) == ((8,), (2, 4), (4, 2), (2, 2, 2))
    assert factorizations(12, 2) == ((12,), (2, 6), (3, 4), (4, 3), (6, 2))
    assert factorizations(1, 3) == ((),)
    found = {config.axes for config in degrees(8, 8, max_axes=2)}
    assert found == {(), (2,), (4,), (2, 2), (8,), (2, 4), (4, 2)}
    assert {config.axes for config in degrees(8, 8, tp=(4, 2))} == {(4, 2)}
    assert {config.axes for config in degrees(8, 8, tp=8, max_axes=2)} == {(8,), (2, 4), (4, 2)}


def test_a_tensor_degree_is_read_as_a_number_or_as_axes() -> None:
    assert [read_axes(tp) for tp in (1, 4, "4", "2x4", (2, 4), (4,))] == [1, 4, 4, (2, 4), (2, 4), 4]
    for wrong in ("2x", "x", "2x1", "0", (0,), (), "2x2x2x2"):
        with pytest.raises(PlanError, match="tp"):
            read_axes(wrong)


def test_batch_that_does_not_divide_says_what_would() -> None:
    with pytest.raises(PlanError, match=r"batch of 6 .* dp=4.*would do: 4, 8"):
        degrees(4, 6, dp=4)
    with pytest.raises(PlanError, match=r"dp=2 with microbatches=3.*would do: 6, 12 \(multiples of 6\)"):
        degrees(4, 8, dp=2, microbatches=3)


def test_devices_that_do_not_divide_say_what_would() -> None:
    with pytest.raises(PlanError, match=r"pp=3 does not divide 8 devices; 6 or 9 devices would do"):
        degrees(8, 8, pp=3)
    with pytest.raises(PlanError, match="no pp x dp x tp makes 7 devices"):
        degrees(7, 8, pp=1, dp=1, max_tp=4)
    with pytest.raises(PlanError, match="tp is at least 1"):
        degrees(8, 8, tp=0)


def test_values_check_themselves() -> None:
    with pytest.raises(ValueError, match="dp is at least 1"):
        Degrees(1, 0, (), 1, "1f1b")
    with pytest.raises(ValueError, match="schedule"):
        Degrees(1, 1, (), 1, "")
    with pytest.raises(ValueError, match="at most 3 tensor axes"):
        Degrees(1, 1, (2, 2, 2, 2), 1, "1f1b")
    with pytest.raises(ValueError, match="at least 2 devices each"):
        Degrees(1, 1, (2, 1), 1, "1f1b")
    assert str(Degrees(1, 1, (2, 4), 1, "1f1b")) == "pp=1 dp=1 tp=2x4 microbatches=1 1f1b"
    assert str(Degrees(2, 3, (4,), 5, "gpipe", "full")) == "pp=2 dp=3 tp=4 microbatches=5 gpipe recompute"
    assert str(Degrees(1, 1, (), 1, "1f1b", "none")) == "pp=1 dp=1 tp=1 microbatches=1 1f1b no-recompute"

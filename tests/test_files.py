"""What commands write is there whole or not at all, and nowhere that the user did not name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopart.cli import main
from autopart.cli.arguments import check_output
from autopart.cluster import Cluster
from autopart.runtime.errors import PlanError
from autopart.runtime.files import write_whole
from autopart.runtime.trace import save_trace


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cluster, trace = tmp_path / "cluster.toml", tmp_path / "trace.json"
    for path in (cluster, trace):
        path.write_text("old")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/cluster\.toml'"):
        Cluster.parse("8xH100").save(cluster)
    with pytest.raises(OSError, match=r"trace\.json"):
        save_trace(trace, {"traceEvents": []})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml", "trace.json"]
    assert cluster.read_text() == trace.read_text() == "old"


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """Root would replace /dev/null by a file."""
    real, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "é")
    assert link.is_symlink() and real.read_bytes() == "é".encode()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, words in (
        (tmp_path, "a folder"),
        (tmp_path / "none" / "x.svg", "no folder"),
        (tmp_path / "x.png", r"name a \.svg file"),
    ):
        with pytest.raises(PlanError, match=words):
            check_output(path, ".svg")
    check_output(tmp_path / "x.svg", ".svg")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PlanError, match="no permission"):
        check_output(tmp_path / "x.svg")


def test_frontier_says_before_planning_that_it_draws_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "hf:gpt2", "--cluster", "2xH100", "-o", str(tmp_path / "x.png")]) == 2
    assert "name a .svg file" in capsys.readouterr().err

"""What commands write is there whole or not at all, and nowhere that the user did not name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopart.cli import main
from autopart.cli.arguments import check_output
from autopart.cluster import Cluster
from autopart.runtime.errors import PlanError
from autopart.runtime.files import named, write_whole
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
        (tmp_path / "x.pdf", r"is SVG or PNG; name a \.svg or \.png file"),
    ):
        with pytest.raises(PlanError, match=words):
            check_output(path, ".svg", ".png")
    check_output(tmp_path / "x.PNG", ".svg", ".png")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(PlanError, match="no permission"):
        check_output(tmp_path / "x.svg")


def test_a_full_disk_is_no_defect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="/dev/full") as caught:
        write_whole("/dev/full", "text")
    assert caught.value.errno == errno.ENOSPC
    limits = ["hf:gpt2?n_layer=1&n_embd=8&n_head=2&vocab_size=16&seq=4", "--cluster", "cpu:1"]
    assert main(["plan", *limits, "-o", "/dev/full"]) == 2
    text = capsys.readouterr().err
    assert "/dev/full: No space left on device; make room" in text and "Traceback" not in text
    for where in (tmp_path / "program", tmp_path / "x.jsonl"):
        with pytest.raises(OSError, match=where.name), named(where), Path("/dev/full").open("w") as file:
            file.write("text")


def test_a_full_disk_behind_stdout() -> None:
    code = "import sys; from autopart.cli import main; sys.exit(main(['rules']))"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2 and "autopart rules: cannot write its output: No space left" in ended.stderr
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr


def test_a_slash_at_the_end_names_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = f"{tmp_path}/none/"
    for command in (["plan", "hf:gpt2", "--cluster", "cpu:1"], ["frontier", "hf:gpt2"], ["simulate", "hf:gpt2"]):
        assert main([*command, "-o", given]) == 2
        assert "name a file" in capsys.readouterr().err
    with pytest.raises(IsADirectoryError, match="none/"):
        Cluster.parse("8xH100").save(given)
    assert not list(tmp_path.iterdir())


def test_frontier_says_before_planning_what_it_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "hf:gpt2", "--cluster", "2xH100", "-o", str(tmp_path / "x.pdf")]) == 2
    assert "name a .svg or .png file" in capsys.readouterr().err

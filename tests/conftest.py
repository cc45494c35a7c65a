"""Test settings: one thread per process, because the tests themselves run in several (pytest -n, gloo ranks)."""

import os

# Before torch is imported, and inherited by the ranks that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What was measured or solved on this machine before does not reach into tests.
os.environ["AUTOPART_CACHE"] = "off"

import torch

torch.set_num_threads(1)

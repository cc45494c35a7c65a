"""Predicted against published step times: what ``autopart validate`` prints.

python benchmarks/validate.py [--fit] [--json]
"""

from __future__ import annotations

import sys

from autopart.cli import main

if __name__ == "__main__":
    sys.exit(main(["validate", *sys.argv[1:]]))

"""``python -m autopart``: the command line where the console script is not installed."""

import sys

from autopart.cli import main

if __name__ == "__main__":
    sys.exit(main())

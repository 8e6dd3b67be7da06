"""Whether kills and damaged inputs do harm; run by hand.

    python -m research.benchmarks.hardening kills --kills 25
    python -m research.benchmarks.hardening fuzz --inputs 10000 --seed 0

Each part ends with a line of figures as JSON, and exits 1 if something was wrong. docs/results.md,
"What it survives", has the figures.
"""

from __future__ import annotations

import argparse
import importlib
import sys

PARTS = ["kills", "fuzz"]


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in PARTS:
        part = importlib.import_module(f"research.benchmarks.hardening.{name}")
        about = part.__doc__ or ""
        added = parts.add_parser(name, description=about, formatter_class=plain)
        added.add_argument("--seed", type=int, default=0)
        part.options(added)
    given = parser.parse_args()
    part = importlib.import_module(f"research.benchmarks.hardening.{given.part}")
    sys.exit(bool(part.run(given)))


if __name__ == "__main__":
    main()

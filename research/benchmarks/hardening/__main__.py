"""Whether kills and damaged inputs do harm; run by hand.

    python -m research.benchmarks.hardening kills --kills 25
    python -m research.benchmarks.hardening index --kills 500
    python -m research.benchmarks.hardening service --minutes 30
    python -m research.benchmarks.hardening fuzz --inputs 10000 --seed 0

Each part ends with a line of figures as JSON, and exits 1 if something was wrong. docs/results.md,
"What it survives", has the figures.
"""

from __future__ import annotations

import sys

from research.benchmarks.hardening import fuzz, index_kills, kills, service
from research.benchmarks.options import parser_of

PARTS = {"kills": kills, "index": index_kills, "service": service, "fuzz": fuzz}


def main() -> None:
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, part in PARTS.items():
        added = parts.add_parser(name, description=part.__doc__)
        added.add_argument("--seed", type=int, default=0)
        part.options(added)
    given = parser.parse_args()
    sys.exit(bool(PARTS[given.part].run(given)))


if __name__ == "__main__":
    main()

"""Takes the pictures of the documentation, with Debian's chromium: ``make pictures``.

docs/page.png is the search page on docs/ itself; research/results/from-raw-curves.png is drawn from
the CSV of the same name. With ``--widths 390 820 1280 --out FOLDER`` the
page and the site's first page are taken at each width, to be looked at.

python -m research.pictures
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from research.benchmarks.from_raw import JUDGED, RECIPE, RESULTS, Plan
from research.benchmarks.options import OUT
from research.docs_site import ROOT

QUERY = "why does the first search take so long"


def take(url: str, out: Path, width: int, height: int = 900) -> None:
    """A picture of an address, once what it fetches is there."""
    chromium = shutil.which("chromium") or sys.exit("install Debian's package chromium")
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=20000"]
    size = [f"--window-size={width},{height}", f"--screenshot={out}"]
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, *flags, *size, f"--user-data-dir={profile}", url]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    print(f"wrote {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--query", default=QUERY)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="what is searched")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--widths", type=int, nargs="*", default=[], help="all pages, at each")
    parser.add_argument("--pages", nargs="*", default=[], help="HTML files, with --widths")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "revela", "serve", str(arguments.folder), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = (re.search(r"http://\S+/", line) for line in server.stdout)
        url = next(found[0] for found in lines if found) + f"?q={quote(arguments.query)}"
        if not arguments.widths:
            take(url, arguments.out / "page.png", 820)
            Plan(RECIPE, OUT, RESULTS, JUDGED).write_curves({})
        for width in arguments.widths:
            take(url, arguments.out / f"page-{width}.png", width)
            for page in map(Path, arguments.pages):
                out = arguments.out / f"{page.stem}-{width}.png"
                take(page.resolve().as_uri(), out, width, 1400)
    finally:
        server.terminate()


if __name__ == "__main__":
    main()

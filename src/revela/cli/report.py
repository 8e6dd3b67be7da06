"""``revela report``: runs on one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from revela.cli.flags import Out


def report(
    runs: Annotated[list[Path], Parameter(negative=())], *, out: Out = Path("report.html")
) -> None:
    """Put runs side by side on one HTML page: curves, scores, settings, and commands.

    The page is self-contained: it needs no network and no scripts, and can be printed.

    Parameters
    ----------
    runs:
        Folders of revela train or compare.
    out:
        The page.
    """
    from revela.training.report import report as write

    found = write(runs, out)
    print(f"saved to {out} (runs: {len(found.runs)})")

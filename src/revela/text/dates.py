"""Dates in ISO 8601, as indexes keep them."""

from __future__ import annotations

import re
from datetime import date


def iso_date(value: object) -> str:
    """The date at the beginning of a value, in ISO 8601: a year, a month or a day; "" if there is
    none.

    >>> iso_date("2024-05-12T10:00"), iso_date(2024), iso_date("2024-13"), iso_date("May")
    ('2024-05-12', '2024', '', '')
    """
    found = re.match(r"(\d{4})(?:-(\d\d)(?:-(\d\d))?)?(?![\d-])", str(value))
    if found is None:
        return ""
    try:
        date(*(int(part or 1) for part in found.groups()))
    except ValueError:
        return ""
    return found[0]

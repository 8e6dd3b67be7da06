"""What reading a corpus found, what it left out and why: counted, with the first few places named."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

NAMED = 5  # how many places of each reason are named


@dataclass
class Report:
    """``skipped`` counts by reason, ``examples`` names the first few places of each; ``bad`` of
    them could not be read.
    """

    documents: int = 0
    words: int = 0
    bad: int = 0
    passages: int = 0
    articles: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    bad_reasons: set[str] = field(default_factory=set)

    def skip(self, reason: str, where: str, bad: bool = False) -> None:
        self.skipped[reason] += 1
        if bad:
            self.bad += 1
            self.bad_reasons.add(reason)
        if len(named := self.examples.setdefault(reason, [])) < NAMED:
            named.append(where)

    def lines(self) -> list[str]:
        """The report for a person: one line, one for joined passages, and one for each reason to
        skip.
        """
        out = [f"read {self.documents:,} documents, {self.words:,} words"]
        if self.passages:
            out.append(
                f"joined {self.passages:,} passages into {self.articles:,} articles of one title each"
            )
        for reason, count in self.skipped.most_common():
            named = self.examples[reason]
            out.append(
                f"skipped {count:,}: {reason} ({', '.join(named)}{', ...' if count > len(named) else ''})"
            )
        return out

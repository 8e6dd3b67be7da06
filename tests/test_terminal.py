"""Groups as a person reads them."""

from __future__ import annotations

from revela.terminal import print_group
from revela.types import Chunk


def test_a_group_is_shown_document_by_document_with_each_title_once(capsys):
    bees, more = Chunk(7, "On bees\n\nBees dance."), Chunk(7, "They find flowers.", "What do bees find?")
    members = [bees, more, Chunk(3, "d3 begins"), Chunk(9, "Wax\n\n")]
    print_group("group 1", members, ["On bees", "On bees", "d3", "Wax"])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "group 1: 4 chunks of 3 documents",
        "  d3",
        "    - d3 begins",
        "  On bees",
        "    - Bees dance.",
        "    - They find flowers.",
        "      asked for by: What do bees find?",
        "  Wax",
        "    - (nothing but the title)",
    ]

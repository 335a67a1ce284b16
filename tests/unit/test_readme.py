"""README says what the results of record say."""

from __future__ import annotations

import pytest

from benchmarks import readme


def test_the_figures_in_readme_are_those_of_the_results():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.replaced(text, readme.figures()) == text, "run: python -m benchmarks.readme"


def test_figures_are_replaced_between_their_markers_alone():
    text = f"before\n{readme.START}\nold\n{readme.END}\nafter"
    assert readme.replaced(text, "new") == f"before\n{readme.START}\nnew\n{readme.END}\nafter"
    with pytest.raises(ValueError, match="lacks the markers"):
        readme.replaced("no markers", "new")

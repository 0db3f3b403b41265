"""The tables of what fits are the planned rows, and the rows are what the planner says."""

import sys

import blocks
import pytest

sys.path.insert(0, str(blocks.ROOT / "docs"))
import generate_what_fits

ROWS = generate_what_fits.read()


def test_page_and_readme_have_the_planned_rows():
    assert len(generate_what_fits.list_distinct(ROWS, 0)) == 12
    assert len(ROWS) == 12 * len(generate_what_fits.list_distinct(ROWS, 1)) * 2
    assert generate_what_fits.PAGE.read_text() == generate_what_fits.page(ROWS)
    readme = generate_what_fits.README.read_text()
    assert generate_what_fits.replaced(readme, ROWS) == readme


@pytest.mark.exhaustive  # by default test_planned_models.py and test_planner.py plan
@pytest.mark.parametrize(
    "key",
    [
        ("RTX 3060 12 GB, 32 GB", "Llama 3.1 8B", "LoRA over nf4"),
        ("RTX 4090 24 GB, 64 GB", "gpt-oss-20b", "LoRA over nf4"),
        ("RTX 4090 24 GB, 64 GB", "Llama 3.3 70B", "all weights"),
        ("H100 80 GB, 256 GB", "Qwen3-14B", "all weights"),
    ],
    ids="-".join,
)
def test_a_row_is_what_the_planner_says(key, monkeypatch):
    monkeypatch.syspath_prepend(str(blocks.ROOT / "benchmarks"))
    import what_fits

    assert tuple(what_fits.row_of(*key)) == ROWS[key]

"""Every code block in README and docs runs, or says why it cannot."""

import blocks
import pytest


@pytest.mark.parametrize("page", blocks.PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_says_why_not(page):
    wrong = [said for block in blocks.blocks_of(page) if (said := blocks.complaint(block))]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


RUNNING = [page for page in blocks.PAGES if any(block.runs for block in blocks.blocks_of(page))]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_blocks_of_a_page_run(page, tmp_path, disk, request):
    found = blocks.blocks_of(page)
    if any("gpu_mesh" in block.text for block in found):
        request.getfixturevalue("h200_compiler")
    blocks.run(found, tmp_path, disk)


@pytest.mark.parametrize(
    "info", ["", "bash", "python no-run:", "python no-run: later", "python skip", "sh  ", "console"]
)
def test_a_block_that_neither_runs_nor_says_why_is_found(info):
    (block,) = blocks.blocks_of(blocks.ROOT / "README.md", f"```{info}\nx\n```\n")
    assert blocks.complaint(block)


@pytest.mark.parametrize(
    "text",
    ["```python\nstate = undefined_name\n```", "```sh\nzerojax memory --params 0 --shards 1\n```"],
)
def test_a_block_that_fails_is_found(text, tmp_path, disk):
    with pytest.raises((NameError, AssertionError)):
        blocks.run(blocks.blocks_of(blocks.ROOT / "README.md", text), tmp_path, disk)

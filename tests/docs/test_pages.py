"""The pages: their length, their links, and the generated page."""

import importlib.util
import re
import shlex
import subprocess

import blocks
import pytest

import zerojax as zj

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def prose(page):
    """Return a page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """Return the fragments that GitHub generates for a page's headings."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in plain}


def test_readme_is_at_most_150_lines():
    assert len((blocks.ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", blocks.PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: the link {link} leads nowhere"
        assert not fragment or fragment in anchors(target), (
            f"{page.name}: {link} does not match any heading of {target.name}"
        )


def test_every_page_is_in_the_index_and_can_be_reached_from_readme():
    index, readme = (
        (blocks.ROOT / "docs/README.md").read_text(),
        (blocks.ROOT / "README.md").read_text(),
    )
    for page in (blocks.ROOT / "docs").rglob("*.md"):
        if page.name != "README.md":
            path = page.relative_to(blocks.ROOT / "docs")
            assert f"({path})" in index or page.name == "index.md", page
    assert "(docs/README.md)" in readme


def test_every_public_name_is_in_the_reference():
    reference = (blocks.ROOT / "docs/reference/zerojax.md").read_text()
    for name in zj.__all__:
        if not name.startswith("__") and name != "linen":
            assert re.search(rf"^\.\. auto\w+:: zerojax\.{name}$", reference, re.MULTILINE), name
            docstring = getattr(zj, name).__doc__ or ""
            assert len(docstring) > 40, f"{name} has no docstring of its own"


def test_every_page_is_in_the_site():
    site = (blocks.ROOT / "docs/index.md").read_text()
    for page in (blocks.ROOT / "docs").rglob("*.md"):
        path = page.relative_to(blocks.ROOT / "docs").with_suffix("")
        if page.name not in ("README.md", "index.md"):
            assert f"\n{path}\n" in site, path


FEATURES = (
    *("stages", "offload", "nvme", "checkpoints", "activations", "precision", "tiling"),
    *("linear_cross_entropy", "recipes", "faults", "fine_tuning", "fine_tuning_data"),
    *("generation", "planner", "aot", "predictions", "gather_on_use", "kernels", "models"),
    *("examples", "program", "experts"),
)
ROWS = ("When to use it", "What it costs", "What it excludes", "How sure it is")
# Words of the matrix's reason -> the page that excludes it, and its words.
REFUSALS = {
    "params off the device": ("stages", "parameters off the device"),
    "gather_ahead=True": ("stages", "`gather_ahead`"),
    "delayed_update=True is not supported with params='nvme'": ("nvme", "`delayed_update`"),
    "delayed_update=True is not supported with grads='nvme'": ("nvme", "`delayed_update`"),
    "opt_state_device_fraction=0.5": ("offload", "`opt_state_device_fraction` excludes"),
    "delayed_update=True needs": ("offload", '`update="in_backward"` excludes'),
    "clip_norm=1.0": ("offload", "`clip_norm`"),
    "precision='fp16'": ("precision", 'fp16 excludes `update="in_backward"`'),
    "in_forward' is not supported with update_on": ("offload", '`update="in_forward"` on the host'),
    "activations='nvme'": ("activations", '`activations="nvme"` excludes `delayed_update`'),
}


def rows_of(name):
    """Return the rows of the table with which a page begins, as (heading, text)."""
    page = (blocks.ROOT / f"docs/{name}.md").read_text()
    return re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", page.split("\n## ")[0], re.MULTILINE)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_page_begins_with_the_same_table(name):
    rows = rows_of(name)
    assert tuple(heading for heading, _ in rows) == ROWS
    assert all(text.strip() for _, text in rows)


def test_pages_exclude_what_the_matrix_refuses():
    matrix = (blocks.ROOT / "docs/reference/compatibility.md").read_text()
    reasons = re.findall(r"^\| [a-z] \|.*\| (.+) \|$", matrix, re.MULTILINE)
    assert len(reasons) == len(REFUSALS)
    for reason, (words, (page, excluded)) in zip(reasons, REFUSALS.items(), strict=True):
        assert words in reason
        assert excluded in dict(rows_of(page))["What it excludes"], f"{page}: {reason}"


def test_files_that_how_it_works_names_exist():
    page = (blocks.ROOT / "docs/how_it_works.md").read_text()
    paths = re.findall(r"`((?:zerojax|host_offload|pallas_kernels|tests)/[\w/.]*)`", page)
    assert len(paths) > 40
    for path in paths:
        assert (blocks.ROOT / path).exists(), path


def test_config_page_is_what_the_docstrings_say():
    path = blocks.ROOT / "docs/generate_config.py"
    spec = importlib.util.spec_from_file_location("generate_config", path)
    assert spec is not None
    assert spec.loader is not None
    generate_config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate_config)
    assert generate_config.PAGE.read_text() == generate_config.page(), "run docs/generate_config.py"


def test_ci_finds_the_test_command_in_readme():
    """`.ci/run` finds it by its mark."""
    (line,) = [
        line
        for line in (blocks.ROOT / ".ci/run").read_text().splitlines()
        if line.startswith("command=$(awk ")
    ]
    awk = shlex.split(line.removeprefix("command=$(").removesuffix(")"))
    command = subprocess.run(
        awk, cwd=blocks.ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert command.strip().endswith(".venv/bin/python -m pytest -n 2 --dist loadgroup")
    assert len(command.splitlines()) == 1

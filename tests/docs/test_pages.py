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

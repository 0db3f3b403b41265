"""A browser for the tests of this folder, which need the built site: `pytest tests/site --site DIR`."""

import contextlib
import functools
import os
import pathlib
from typing import NoReturn

import pytest
import visits


def pytest_generate_tests(metafunc):
    """Run a test with the argument `site_page` for each page of the site."""
    if "site_page" in metafunc.fixturenames:
        folder = metafunc.config.getoption("site")
        pages = [] if folder is None else sorted(pathlib.Path(folder).rglob("*.html"))
        names = [str(page.relative_to(folder)) for page in pages if "_static" not in page.parts]
        metafunc.parametrize("site_page", names or ["no page"])


def absent(what: str) -> NoReturn:
    """Skip the test because something is missing; in CI, which installs it, fail."""
    if os.environ.get("CI"):
        pytest.fail(f"CI installs it, but {what}")
    pytest.skip(what)


@pytest.fixture(autouse=True, scope="session")
def site(request) -> pathlib.Path:
    """Return the folder of the built site."""
    folder = request.config.getoption("site")
    if folder is None:
        pytest.skip("these tests need the built site: sphinx-build docs DIR, then --site DIR")
    if not (pathlib.Path(folder) / "index.html").is_file():
        raise pytest.UsageError(f"--site {folder}: no index.html there")
    return pathlib.Path(folder)


@pytest.fixture(scope="session")
def browser(site):
    """Start a browser for all tests."""
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        absent("playwright cannot be found; run pip install 'zerojax[browser]'")
    if (chromium := visits.find_chromium()) is None:
        absent(f"there is no {' or '.join(visits.CHROMIUMS)}; run apt-get install chromium")
    with sync_playwright() as playwright:
        browser = visits.launch(playwright, chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def visitor_of(browser):
    """Return a function from a folder and a width to a visitor, which keeps its visits."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def address_of(folder: pathlib.Path) -> str:
            return stack.enter_context(visits.serve(folder))

        @functools.cache
        def visitor_of(folder: pathlib.Path, width: int) -> visits.Visitor:
            return visits.Visitor(browser, folder, address_of(folder), width)

        yield visitor_of

"""Every page of the built site, in a browser, on a laptop's and a phone's width."""

import pytest
from visits import WIDTHS


@pytest.mark.parametrize("width", WIDTHS)
def test_page_loads_and_fits(visitor_of, site, site_page, width):
    faults = visitor_of(site, width).visit(site_page).faults
    assert not faults, "\n".join(faults)


def test_links_lead_somewhere(visitor_of, site, site_page):
    broken = visitor_of(site, WIDTHS[0]).broken_links(site_page)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("width", WIDTHS)
def test_search_finds_a_word(visitor_of, site, width):
    """The reader types a word into the field of any page, and opens the first result."""
    visitor = visitor_of(site, width)
    visitor.page.goto(f"{visitor.address}limits.html")
    visitor.problems.clear()
    visitor.page.locator("button.search-button__button:visible").first.click()
    visitor.page.keyboard.type("prefetch")
    visitor.page.keyboard.press("Enter")
    visitor.page.wait_for_url("**/search.html?q=prefetch*")
    results = visitor.page.locator("#search-results li a")
    results.first.wait_for()
    assert results.count() > 1
    results.first.click()
    visitor.page.wait_for_load_state("networkidle")
    assert "search.html" not in visitor.page.url
    assert "prefetch" in visitor.page.locator("article").inner_text().lower()
    assert visitor.problems == []


def test_contents_open_on_a_phone(visitor_of, site):
    page = visitor_of(site, WIDTHS[1]).page
    page.goto(f"{visitor_of(site, WIDTHS[1]).address}index.html")
    entry = page.locator("nav.bd-links a", has_text="Quickstart")
    assert not entry.is_visible()
    page.locator("button.primary-toggle:visible").click()
    entry.click()
    page.wait_for_url("**/quickstart.html")

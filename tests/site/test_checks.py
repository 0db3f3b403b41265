"""The checks of this folder's tests can fail: pages with one fault each."""

import re

import pytest

GOOD = """<p id="here">A page. <a href="#here">Here</a>, <a href="other.html#there">there</a>,
<a href="https://example.org/">elsewhere</a>.</p>
<img alt="a dot" src="data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==">
<div style="overflow-x: auto"><div style="width: 3000px">Scrolls by itself.</div></div>"""


@pytest.fixture(scope="module")
def visitor(visitor_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "dot.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    )
    (folder / "other.html").write_text('<!DOCTYPE html><p id="there">there</p>')
    return folder, visitor_of(folder, 390)


def write(folder, body):
    text = f'<!DOCTYPE html>\n<html lang="en"><head><title>A page</title></head>{body}</html>'
    name = f"page{len(list(folder.iterdir()))}.html"
    (folder / name).write_text(text)
    return name


def test_a_good_page_has_no_fault(visitor):
    folder, visitor = visitor
    name = write(folder, GOOD)
    assert visitor.visit(name).faults == []
    assert visitor.broken_links(name) == []


FAULTS = {
    "wide": (
        '<div class="big one" style="width: 3000px">text</div>',
        r"scrolls sideways: 30\d\d px in a window of 390 px: div.big.one 'text'",
    ),
    "wide-text": (f"<pre><b>{'a' * 300}</b></pre>", "scrolls sideways: .*: b 'aaa"),
    "no-image": ('<img src="no.png" alt="a">', "request failed: .*/no.png: 404"),
    "no-script": ('<script src="no.js"></script>', "request failed: .*/no.js: 404"),
    "no-picture": ('<img src="other.html" alt="a">', "the image other.html has no picture"),
    "no-alt": ('<img src="dot.svg">', "the image dot.svg has no alt text"),
    "empty-alt": ('<img src="dot.svg" alt=" ">', "the image dot.svg has no alt text"),
    "error": ("<script>console.error('bad')</script>", "console error: bad"),
    "warning": ("<script>console.warn('odd')</script>", "console warning: odd"),
    "exception": ("<script>undefined_name()</script>", "uncaught: undefined_name is not defined"),
    "rejection": ("<script>Promise.reject(Error('late'))</script>", "uncaught: late"),
    "network": (
        '<link rel="stylesheet" href="https://example.org/a.css">',
        "needs the network: https://example.org/a.css",
    ),
}
"""Bodies of pages with one fault, and the text that names it."""


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_found(visitor, case):
    folder, visitor = visitor
    body, expected = FAULTS[case]
    faults = visitor.visit(write(folder, f"<p>A page.</p>{body}")).faults
    assert re.search(expected, "\n".join(faults))


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("no.html", "no.html: no such file"),
        ("#nowhere", "#nowhere: no such anchor"),
        ("other.html#here", "other.html#here: no such anchor"),
        ("file:///etc/hosts", "file:///etc/hosts: outside the site"),
    ],
)
def test_a_broken_link_is_found(visitor, link, fault):
    folder, visitor = visitor
    (broken,) = visitor.broken_links(write(folder, f'<a href="{link}">a link</a>'))
    assert broken.endswith(fault)

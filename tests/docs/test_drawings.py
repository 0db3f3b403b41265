"""The pictures: each is shown by a page, is drawn by `draw.py` from stored figures, and is legible."""

import importlib
import itertools
import json
import re
import sys
from xml.etree import ElementTree

import blocks
import pytest

FOLDER = blocks.ROOT / "docs/pictures"
sys.path.insert(0, str(FOLDER))
draw = importlib.import_module("draw")
SVG = "{http://www.w3.org/2000/svg}"
SHOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
WIDE = 0.6
"""Width of a character over its size, in a wide font."""


def texts_of(picture):
    """Return (words, left, right, baseline, size) of each text of an SVG document."""
    found = []
    for text in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
        width = WIDE * size * len(text.text)
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]]
        found.append((text.text, left, left + width, y, size))
    return found


def test_every_picture_is_drawn_and_is_shown_with_its_content_in_words():
    shown = {}
    for page in blocks.PAGES:
        for words, path in SHOWN.findall(page.read_text()):
            shown.setdefault((page.parent / path).resolve(), []).append(" ".join(words.split()))
    files = {path.stem for path in FOLDER.glob("*.svg")}
    assert files == set(draw.PICTURES)
    for name in files:
        words = shown.get(FOLDER / f"{name}.svg", [])
        assert words, f"no page shows {name}.svg"
        assert min(map(len, words)) > 80, f"{name}.svg needs a text that says what it shows"


@pytest.mark.parametrize("name", draw.PICTURES)
def test_picture_is_what_the_figures_say(name):
    assert (FOLDER / f"{name}.svg").read_text() == draw.PICTURES[name](), (
        "run python docs/pictures/draw.py"
    )


@pytest.mark.parametrize("name", draw.PICTURES)
def test_texts_are_within_the_picture_and_apart(name):
    picture = (FOLDER / f"{name}.svg").read_text()
    _, _, width, height = map(float, ElementTree.fromstring(picture).attrib["viewBox"].split())
    texts = texts_of(picture)
    assert len(texts) > 3
    for words, left, right, y, size in texts:
        assert left >= 0, words
        assert right <= width, words
        assert size <= y <= height - 3, words
        # On a telephone of 390 pixels, with a page's margins: at least 8 pixels.
        assert size * 350 / width > 7.5, words
    for one, other in itertools.combinations(texts, 2):
        apart = one[1] >= other[2] or other[1] >= one[2]
        assert apart or abs(one[3] - other[3]) > 0.8 * max(one[4], other[4]), (one, other)


@pytest.mark.parametrize("path", sorted((FOLDER / "data").glob("*.json")), ids=lambda p: p.stem)
def test_stored_figures_name_their_command_and_machine(path):
    stored = json.loads(path.read_text())
    assert stored["command"] == f"python docs/pictures/measure.py {path.stem}"
    assert all(stored[key] for key in ("machine", "date", "jax", "model"))


def test_losses_of_all_tiers_and_stages_agree():
    losses = draw.data("losses")["losses"]
    assert len(losses) == 9
    for curve in losses.values():
        assert curve == pytest.approx(losses["stage 3, device"], rel=1e-5)

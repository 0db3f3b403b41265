"""The prose is plain English: turns of phrase that no native writer of this field uses are refused."""

import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import blocks
import pytest

TURNS = {
    'a sentence begins with "Of"': r"(?:^|[.:;!?\"] |\n)Of (?!course\b)[a-z`'\"0-9]",
    "likewise": r"\b[Ll]ikewise\b",
    "whoever": r"\b[Ww]hoever\b",
    "anew": r"\banew\b",
    'rests, for "is stored"': r"\brests\b",
    'are no stack, for "unstacked"': r"\b(is|are) no stack\b",
    "as of `name`": r"\bas of `",
    "Tell whether": r"\bTell whether\b",
}
FOLDERS = ("zerojax", "host_offload", "pallas_kernels", "examples", "docs")


def prose_of(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of comments and of strings that hold a space."""
    text = path.read_text()
    if path.suffix == ".md":
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and " " in token.string:
            yield token.start[0], token.string


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_has_no_turns_of_another_language(folder):
    found = []
    for path in sorted((blocks.ROOT / folder).rglob("*")):
        if path.suffix not in (".py", ".md"):
            continue
        for first, text in prose_of(path):
            text = re.sub(r"\n[ ]+", "\n", text)
            for turn, pattern in TURNS.items():
                for match in re.finditer(pattern, text):
                    line = first + text[: match.start()].count("\n")
                    found.append(f"{path.relative_to(blocks.ROOT)}:{line}: {turn}")
    assert not found, "\n".join(found)

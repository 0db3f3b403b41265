"""Sphinx configuration of the documentation site.

    pip install -e '.[docs]'
    sphinx-build -W docs docs/_build/html

The pages are the Markdown files of this folder, which also read well on GitHub. Tutorials are
executed while the site is built. Links to files outside this folder become downloads, since the
site holds no copy of the repository.
"""

import pathlib
import re
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PACKAGES = ("zerojax", "host_offload", "pallas_kernels")

project = "zerojax"
author = "the zerojax authors"
copyright = "2026, the zerojax authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# README.md is the index for readers on GitHub.
exclude_patterns = ["README.md", "_build"]
default_role = "code"

html_theme = "sphinx_book_theme"
html_title = "zerojax"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}  # the theme logs an error on the console without it
html_theme_options = {
    "use_download_button": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the sidebar has the search field
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

nb_execution_mode = "force"
nb_execution_timeout = 60
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures with types of JAX are longer than the text they stand on
autodoc_preserve_defaults = True  # `families=FAMILIES`, not the table itself
autodoc_default_options = {"members": True}  # any value of "show-inheritance" shows `Bases: object`
napoleon_use_ivar = True
napoleon_use_rtype = False

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def link_files(app: Any, name: str, source: list[str]) -> None:
    """Replace links to files outside the documentation by downloads, and to folders by text."""
    if name == "changelog":
        source[0] = (HERE.parent / "CHANGELOG.md").read_text().replace("](docs/", "](")
    folder = (HERE / name).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], (folder / match[2]).resolve()
        if target.is_relative_to(HERE):
            return match[0]
        if target.is_file():
            return "{download}`" + text.replace("`", "") + f" <{match[2]}>`"
        return text

    source[0] = _LINK.sub(replaced, source[0])


def as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring of this project into reStructuredText.

    Indented blocks become literal blocks; stars, bars and trailing underscores are escaped.
    """
    text, literal = list[str](), False
    section = False
    for n, line in enumerate(lines):
        stripped = line.lstrip()
        indent = len(line) - len(stripped)
        if indent == 0 and stripped:
            literal = False
            section = bool(re.fullmatch(r"(Args|Attributes|Returns|Yields|Raises):", stripped))
        if not section and indent >= 4 and not literal and (n == 0 or not lines[n - 1].strip()):
            text += ["::", ""]
            literal = True
        if literal or not stripped:
            text.append(line)
            continue
        parts = re.split(r"(`+[^`]*`+)", line)
        for at in range(0, len(parts), 2):
            part = parts[at]
            if not (section and at == 0 and re.match(r"\s+\*{1,2}\w+:", part)):
                part = part.replace("*", r"\*")
            parts[at] = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part.replace("|", r"\|"))
        text.append("".join(parts))
    lines[:] = text


def shorten_types(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Shorten the types of attributes, which napoleon takes from annotations, after it ran."""
    for at, line in enumerate(lines):
        if line.startswith(":vartype "):
            line = line.replace("jax.jaxlib._jax.Array", "jax.Array")
            lines[at] = re.sub(r"\b(collections\.abc|typing)\.(?=[A-Z])", "", line)


def name_defaults(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str
) -> tuple[str | None, str]:
    """Name functions and classes that are defaults of fields; Linen's own fields are left out."""
    if signature is not None:
        signature = re.sub(r", parent=<[^>]*>, name=None", "", signature)
        pattern = r"<(?:function|class) '?([\w.]+?)(?:\.<locals>\.\w+)?'?>"
        signature = re.sub(pattern, r"\1", signature)
    return signature, returns


def skip_foreign(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out functions of other packages that are defaults of a class's fields."""
    package = (getattr(obj, "__module__", None) or "").split(".")[0]
    if callable(obj) and package and package not in PACKAGES:
        return True
    return None  # autodoc's own choice


def setup(app: Any) -> None:
    """Connect the functions to Sphinx."""
    app.connect("source-read", link_files)
    app.connect("autodoc-process-docstring", as_rst, priority=400)
    app.connect("autodoc-process-docstring", shorten_types, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", name_defaults)
    app.connect("autodoc-skip-member", skip_foreign)

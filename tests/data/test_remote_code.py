"""This project never lets transformers run a folder's code, or ask whether it may."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDERS = ("zerojax", "examples", "benchmarks", "tests", "docs")


def loads(tree: ast.AST) -> list[ast.Call]:
    """Return the from_pretrained and from_config calls on transformers' Auto classes."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    return [
        call
        for call in calls
        if re.search(r"\bAuto\w+\.from_(pretrained|config)$", ast.unparse(call.func))
    ]


def refuses_code(call: ast.Call) -> bool:
    """Return whether a call has trust_remote_code=False.

    Options passed by ** are assumed to contain it.
    """
    given = {word.arg: word.value for word in call.keywords}
    told = given.get("trust_remote_code")
    return None in given or (isinstance(told, ast.Constant) and told.value is False)


def test_every_load_by_transformers_refuses_code():
    found, wrong = 0, []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        if "from_pretrained" not in text and "from_config" not in text:
            continue
        for call in loads(ast.parse(text)):
            found += 1
            if not refuses_code(call):
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert found > 3
    assert not wrong, f"calls without trust_remote_code=False: {wrong}"
    bad = "t = transformers.AutoTokenizer.from_pretrained('a', trust_remote_code=True)"
    assert not refuses_code(*loads(ast.parse(bad)))


def test_blocks_of_the_documentation_refuse_code():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for call in re.findall(r"Auto\w+\.from_(?:pretrained|config)\((.+)\)", path.read_text()):
            assert "trust_remote_code=False" in call, path

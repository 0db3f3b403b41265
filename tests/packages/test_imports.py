"""The modules that `import zerojax` and the command import, each in a new process.

Nothing unused is imported.
"""

import ast
import json
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import zerojax as zj
from zerojax import vocabulary
from zerojax.precision import PRECISIONS
from zerojax.weights import DTYPES

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SLOW = (
    "jax.experimental.mosaic", "jax._src.pallas.mosaic_gpu.core", "orbax", "numba", "llvmlite", "scipy", "transformers",
    "datasets", "torch", "zerojax.planner", "zerojax.choice",
)  # fmt: skip
"""Packages that most programs never use."""
TRAIN = """
import jax, jax.numpy as jnp, optax
import zerojax as zj
model = zj.Model(lambda key: {"w": jnp.ones((4, 4))}, lambda p, batch, key: jnp.mean((batch @ p["w"]) ** 2))
program = zj.build_train_step(model, optax.adamw(1e-3), zj.ZeroConfig(stage=3), zj.make_mesh())
state = program.init(jax.random.key(0))
jax.block_until_ready(program.step(state, jnp.ones((4, 4))))
"""


def imported_by(code: str) -> set[str]:
    """Return the modules that a process has imported after running some code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def parts_of(modules: set[str], packages: tuple[str, ...]) -> list[str]:
    return [
        m
        for m in sorted(modules)
        if any(m == package or m.startswith(f"{package}.") for package in packages)
    ]


def test_training_on_a_cpu_imports_nothing_that_it_does_not_use():
    assert not parts_of(imported_by(TRAIN), SLOW)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["simulate", "--help"], ["plan", "--layers", "x"], ["memory", "--layers", "2"]],
)
def test_help_and_wrong_options_import_no_jax(arguments):
    code = f"""
import contextlib, io
from zerojax import cli
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    cli.main({arguments!r})
"""
    assert not parts_of(imported_by(code), (*SLOW, "jax"))


def test_public_names_are_imported_when_they_are_used():
    modules = imported_by("import zerojax")
    assert parts_of(modules, ("zerojax",)) == ["zerojax"]
    assert "jax" not in modules
    assert "zerojax.config" in imported_by("from zerojax import ZeroConfig")


def test_type_checkers_see_the_names_that_are_imported_lazily():
    tree = ast.parse(pathlib.Path(zj.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    assert seen == zj._HOME
    modules = [node for node in block.body if isinstance(node, ast.Import)]
    offered = {alias.asname: alias.name for node in modules for alias in node.names}
    assert offered == {"linen": "zerojax.linen"}
    assert {*seen, *offered, "__version__"} == set(zj.__all__)


def test_modules_are_attributes_and_unknown_names_are_errors():
    assert zj.hlo.simulate is not None  # pyright: ignore[reportAttributeAccessIssue]
    assert set(zj.__all__) <= set(dir(zj))
    with pytest.raises(
        AttributeError, match="'zerojax' has no attribute 'ZeroConfg'; did you mean 'ZeroConfig'"
    ):
        zj.ZeroConfg  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from zerojax import nothing")


def test_the_words_of_commands_are_those_of_the_tables():
    assert tuple(PRECISIONS) == vocabulary.PRECISION_NAMES
    assert tuple(DTYPES) == vocabulary.EXPORT_DTYPES


OURS = ("zerojax", "host_offload", "pallas_kernels")
DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}
"""Names under which packages are declared, where they differ from what is imported."""


def imports_of(path: pathlib.Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - set(OURS)


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    name = re.compile(r"[A-Za-z0-9_-]+")
    needed = {match[0] for line in project["dependencies"] if (match := name.match(line))}
    optional = {match[0] for line in extras if (match := name.match(line))}
    imported: dict[str, str] = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            imported |= {DISTRIBUTIONS.get(n, n): str(path) for n in imports_of(path)}
    declared = needed | {extra.replace("-", "_") for extra in optional} | {"cuda"}  # cuda-bindings
    assert not (missing := {n: imported[n] for n in imported if n not in declared}), missing
    unused = needed - set(imported)
    assert unused <= {"jaxlib"}, unused

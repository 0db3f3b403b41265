"""Docstrings of the public names: every parameter, and the unit of every number."""

import dataclasses
import importlib
import inspect
import pydoc
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import blocks
import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import metrics as metrics_of_steps

PACKAGES = (
    "zerojax",
    "zerojax.hf",
    "zerojax.data",
    "zerojax.planner",
    "zerojax.tiling.linen",
    "zerojax.experts.linen",
)
OTHERS = ("host_offload", "pallas_kernels.storage", "pallas_kernels.matmul")
OPS = ("pallas_kernels.quantize", "pallas_kernels.nf4", "pallas_kernels.linear_cross_entropy")
OF_REPORTS = {"element", "line", "text", "round_ticks", "draw_parts", "draw_tiers", "Part"}
INTERNAL = OF_REPORTS | {"run_plan", "auto", "changed", "report", "attend", "files_beside", "table"}
"""Exported for other folders of the project, and not part of the reference."""
FLAX_OWN = {"parent", "name"}
"""Parameters that Flax adds to each Linen module."""
ENTRY = re.compile(r"^\.\. auto\w+:: ([\w.]+)$", re.MULTILINE)
UNIT = re.compile(r"\b(bytes|number of \w+|fraction of|norm|factor)\b", re.IGNORECASE)


def exported(package: str) -> Iterator[tuple[str, Any]]:
    """Yield a package's functions and classes: defined in it, or imported as `X as X`."""
    module = importlib.import_module(package)
    again = set(re.findall(r"import (\w+) as \1\b", inspect.getsource(module)))
    names = module.__all__ if package == "zerojax" else vars(module)
    for name in names:
        thing = getattr(module, name)
        own = getattr(thing, "__module__", None) == package or name in again
        if not name.startswith("_") and callable(thing) and (own or package == "zerojax"):
            yield f"{package}.{name}", thing


def methods(name: str, cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods that a class defines itself."""
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for key, value in vars(cls).items():
        if not key.startswith("_") and key not in fields and inspect.isfunction(value):
            yield f"{name}.{key}", value


EXPORTED = {
    name: thing for package in (*PACKAGES, *OTHERS, *OPS) for name, thing in exported(package)
}
CALLABLES = EXPORTED | {
    name: method
    for owner, thing in EXPORTED.items()
    if inspect.isclass(thing)
    for name, method in methods(owner, thing)
}


def parameters(thing: Any) -> list[str]:
    """Return the names of the parameters that a caller gives."""
    names = list(inspect.signature(thing).parameters)
    linen = inspect.isclass(thing) and "flax" in str(thing.__mro__)
    ours = [name for name in names if name not in ("self", "args", "kwargs")]
    return [name for name in ours if not (linen and name in FLAX_OWN)]


def is_named(parameter: str, docstring: str) -> bool:
    """Return whether a docstring names a parameter; one letter needs backticks, Args or a shape."""
    if len(parameter) > 1:
        return re.search(rf"(?<!\w){re.escape(parameter)}(?!\w)", docstring) is not None
    forms = (rf"`{parameter}`", rf"(?m)^ *(\w+, )*{parameter}(, \w+)*:", rf"(?<!\w){parameter}\[")
    return any(re.search(form, docstring) for form in forms)


@pytest.mark.parametrize("name", CALLABLES)
def test_a_docstring_names_each_parameter(name):
    thing = CALLABLES[name]
    docstring = inspect.getdoc(thing) or ""
    assert docstring, f"{name} has no docstring"
    if inspect.isclass(thing):
        constructors = (thing.__init__, thing.__new__)
        docstring += "\n".join(inspect.getdoc(make) or "" for make in constructors)
    given = parameters(thing)
    if given and name.rpartition(".")[2] not in INTERNAL:
        listed = re.search(r"^(Args|Attributes):$", docstring, re.MULTILINE)
        assert listed, f"{name}: its docstring has neither Args nor Attributes"
    missing = [p for p in given if not is_named(p, docstring)]
    assert not missing, f"{name}: the docstring does not name {', '.join(missing)}"


def test_a_name_counts_only_as_a_word_of_its_own():
    assert is_named("step", "Return the step.")
    assert not is_named("step", "Return the steps.")
    assert not is_named("a", "Return a number.")
    assert is_named("x", "Args:\n  x, y: corners.")


@pytest.mark.parametrize("package", PACKAGES[1:4] + OTHERS + OPS)
def test_the_reference_has_every_exported_name(package):
    pages = [blocks.ROOT / f"docs/reference/{name}.md" for name in ("packages", "zerojax")]
    listed = [name for page in pages for name in ENTRY.findall(page.read_text())]
    things = [pydoc.locate(name) for name in listed]
    for full, thing in exported(package):
        if full.rpartition(".")[2] not in INTERNAL:
            assert thing in things, f"{full} is in neither page of the reference"


def numbers(cls: type) -> Iterator[str]:
    """Yield the fields of a config that hold a number."""
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if {int, float} & {types[field.name], *typing.get_args(types[field.name])}:
            yield field.name


@pytest.mark.parametrize("cls", [zj.ZeroConfig, zj.Segment, zj.LossScaling])
def test_a_number_of_the_configuration_has_a_unit(cls):
    page = (blocks.ROOT / "docs/config.md").read_text()
    _, _, section = page.partition(f"## {cls.__name__}\n")
    for name in numbers(cls):
        (row,) = re.findall(rf"^\| `{name}` \|.*$", section.partition("\n## ")[0], re.MULTILINE)
        assert UNIT.search(row), f"{cls.__name__}.{name}: no unit in {row}"


def units(page: str) -> dict[str, str]:
    """Return the unit of each metric that a table of a page lists."""
    text = (blocks.ROOT / "docs" / page).read_text()
    _, _, table = text.partition("| metric | unit | what it is |\n|---|---|---|\n")
    rows = [line.split(" | ") for line in table.partition("\n\n")[0].splitlines()]
    return {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


def test_every_metric_of_a_step_has_a_unit(tmp_path):
    listed = units("program.md") | units("nvme.md")
    assert set(metrics_of_steps.OURS) <= set(listed)
    model = zj.Model(
        lambda key: {"w": jnp.ones((8, 8))}, lambda p, batch, key: jnp.mean((batch @ p["w"]) ** 2)
    )
    config = zj.ZeroConfig(precision="fp16", opt_state="nvme", swap_dir=str(tmp_path))
    tx = optax.adamw(optax.constant_schedule(1e-3))
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with zj.build_train_step(model, tx, config, mesh) as program:
        _, metrics = program.step(program.init(jax.random.key(0)), jnp.ones((4, 8)))
    assert set(metrics) <= set(listed), set(metrics) - set(listed)
    assert all(listed.values())

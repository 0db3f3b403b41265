"""What the packages promise to their users: names, a version, and types."""

import importlib
import importlib.metadata
import pathlib
import tomllib

import pytest

import zerojax as zj

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGES = ("zerojax", "host_offload", "pallas_kernels")


def test_all_names_what_can_be_imported():
    assert len(set(zj.__all__)) == len(zj.__all__)
    imported: dict[str, object] = {}
    exec("from zerojax import *", imported)
    for name in zj.__all__:
        assert imported[name] is getattr(zj, name), name


def test_all_leaves_out_no_public_class_or_function():
    public = {
        name for name, value in vars(zj).items() if callable(value) and not name.startswith("_")
    }
    assert public <= set(zj.__all__)


@pytest.mark.parametrize("module", ["state", "tiling", "memory", "aot", "hlo", "metrics", "config"])
def test_documented_modules_can_be_imported(module):
    importlib.import_module(f"zerojax.{module}")


def test_version_is_that_of_the_installed_package():
    assert zj.__version__ == importlib.metadata.version("zerojax")


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_for_its_users_and_installs_its_data(package):
    assert (ROOT / package / "py.typed").is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = {
        str(p.relative_to(ROOT / package))
        for p in (ROOT / package).rglob("*")
        if p.suffix in (".typed", ".json")
    }
    assert set(project["tool"]["setuptools"]["package-data"][package]) == data

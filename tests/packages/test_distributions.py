"""What a wheel and a source distribution hold: all files of the packages, and no other package."""

import importlib.metadata
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGES = ("zerojax", "host_offload", "pallas_kernels")


def files_of(root: pathlib.Path, *folders: str) -> set[str]:
    """Return the files of some folders, without what Python compiled."""
    found = [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}


def test_every_file_of_a_package_is_a_module_or_declared_data():
    """A folder without `__init__.py` would be left out of the wheel, and data that is undeclared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in PACKAGES:
        for name in files_of(ROOT, package):
            path = pathlib.Path(name)
            if path.suffix == ".py":
                assert (ROOT / path.parent / "__init__.py").is_file(), name
            else:
                data = project["tool"]["setuptools"]["package-data"][package]
                assert str(path.relative_to(package)) in data, name


@pytest.mark.exhaustive
def test_distributions_hold_the_packages_and_the_sources(tmp_path):
    """Build both from a copy, since a build leaves files in the tree."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    shutil.copytree(ROOT, tree, ignore=ignored)
    for kind in ("wheel", "sdist"):
        code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    (source,) = out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert in_wheel == files_of(ROOT, *PACKAGES)
    with tarfile.open(source) as archive:
        files = [member.name for member in archive if member.isfile()]
    in_source = {name.partition("/")[2] for name in files}
    folders = files_of(ROOT, *PACKAGES, "tests", "docs", "examples", "benchmarks")
    built = {name for name in folders if name.startswith("docs/_build/")}
    assert folders - built <= in_source
    assert {"README.md", "CHANGELOG.md", "LICENSE", "CONTRIBUTING.md"} <= in_source
    assert not built & in_source
    assert f"zerojax-{importlib.metadata.version('zerojax')}-" in wheel.name

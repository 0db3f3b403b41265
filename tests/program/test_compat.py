"""Versions of jaxlib that must not run steps on GPUs are refused.

A program that they only compile warns about them by name.
"""

import logging

import jax
import optax
import pytest
import toys

import zerojax as zj
from zerojax import aot, compat


@pytest.fixture
def installed(monkeypatch):
    """Pretend that a version of jaxlib is installed."""
    compat._warn_once.cache_clear()

    def install(version):
        monkeypatch.setattr(compat.importlib.metadata, "version", lambda name: version)

    yield install
    compat._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.10.2", (0, 10, 2)),
        ("0.11.1.dev20260801", (0, 11, 1)),
        ("0.12.0rc1", (0, 12, 0)),
        ("0.12.0.1", (0, 12, 0)),
    ],
)
def test_the_version_of_jaxlib_is_read_as_numbers(installed, version, numbers):
    installed(version)
    assert compat.jaxlib_version() == numbers


def test_an_older_jaxlib_is_refused_on_a_gpu_by_its_remedy(installed):
    installed("0.11.0")
    with pytest.raises(
        RuntimeError,
        match=r"jaxlib 0\.11\.0 cannot train on GPUs.*46231.*0\.11\.1 or newer.*Python 3\.12",
    ):
        compat.check_gpu_version("gpu", runs=True)
    installed("0.11.1")
    compat.check_gpu_version("gpu", runs=True)


def test_programs_for_gpus_that_are_not_there_are_compiled_with_a_warning(installed, caplog):
    installed("0.10.2")
    mesh = aot.gpu_mesh("h200", gpus_per_host=1)
    with caplog.at_level(logging.WARNING, "zerojax"):
        zj.build_train_step(toys.small(), optax.sgd(0.1), zj.ZeroConfig(), mesh)
        zj.build_train_step(toys.small(), optax.sgd(0.1), zj.ZeroConfig(), mesh)
    assert [r.message[:60] for r in caplog.records if "jaxlib" in r.message] == [
        "jaxlib 0.10.2 compiles programs for GPUs that must not run: "
    ]


def test_cpus_take_any_version(installed, caplog):
    installed("0.10.2")
    zj.build_train_step(
        toys.small(), optax.sgd(0.1), zj.ZeroConfig(), zj.make_mesh(devices=jax.devices()[:1])
    )
    assert not caplog.records

"""The self-test of host slices and of host memory's limits, on the CPU.

The CPU slices correctly, so the tests plant every fault.
"""

import dataclasses
import types

import jax
import numpy as np
import pytest

from host_offload.device import limits, self_test

L = len(self_test.records())
ORDERS = {
    "ascending": np.arange(L, dtype=np.int32),
    "descending": np.arange(L, dtype=np.int32)[::-1],
}
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _fresh():
    self_test._wrong_forms.cache_clear()
    yield
    self_test._wrong_forms.cache_clear()


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
@pytest.mark.parametrize("name", self_test.forms())
def test_forms_equal_numpy_exactly(name, kind):
    form = self_test.forms()[name]
    run = self_test.build_form(form, jax.devices()[0], kind)
    for order in ORDERS.values():
        found = run(order, self_test.records())
        for f, e in zip(found, form.expect(order, self_test.records()), strict=True):
            np.testing.assert_array_equal(f, e)
        assert [f.sharding.memory_kind for f in found] == [kind, "device"]


def test_an_order_that_is_not_linear_is_refused():
    run = self_test.build_form(self_test.forms()["read"], jax.devices()[0])
    with pytest.raises(
        ValueError, match=r"\[3, 0, 5, 1, 4, 2\] is not linear: its steps are \[-3, 5"
    ):
        run(np.array([3, 0, 5, 1, 4, 2], np.int32), self_test.records())


def test_check_passes_and_runs_once_for_each_device(monkeypatch):
    built, one = [], {"read": self_test.forms()["read"]}
    build_form = self_test.build_form
    monkeypatch.setattr(self_test, "_FORMS", types.MappingProxyType(one))
    monkeypatch.setattr(
        self_test,
        "build_form",
        lambda form, device: built.append(device) or build_form(form, device),
    )
    first, second = jax.devices()[:2]
    for device in (None, first, first, second):
        self_test.check_host_slices(device)
    assert built == [first, second]


def test_slices_at_the_raw_counter_are_seen(monkeypatch):
    """XLA of jax 0.10 reads host memory this way on a GPU, for any function of the counter."""
    monkeypatch.setattr(self_test.Order, "__getitem__", lambda order, i: jax.numpy.int32(i))
    with pytest.raises(
        RuntimeError, match="read descending, read_ahead descending, update descending"
    ):
        self_test.check_host_slices()


@pytest.mark.parametrize("name", self_test.forms())
def test_a_form_that_slices_at_the_raw_counter_is_named(monkeypatch, name):
    form = self_test.forms()[name]
    raw = dataclasses.replace(
        form, run=lambda order, stack, kind: form.run(self_test.Order(0, 1, L), stack, kind)
    )
    monkeypatch.setattr(self_test, "_FORMS", types.MappingProxyType({name: raw}))
    for _ in range(2):  # the answer is cached, the error is not
        with pytest.raises(
            RuntimeError,
            match=rf"wrong records: {name} descending \(jax {jax.__version__}, jaxlib.*46231.*XLA_FLAGS",
        ):
            self_test.check_host_slices()


def test_a_record_stored_at_the_raw_counter_is_seen(monkeypatch):
    """Loads are correct and stores are not, as if only dynamic-update-slices had the fault."""
    store = self_test._store
    monkeypatch.setattr(
        self_test,
        "_store",
        lambda stack, record, layer, kind: store(stack, record, L - 1 - layer, kind),
    )
    with pytest.raises(
        RuntimeError, match="update ascending, update descending, update_ahead ascending"
    ):
        self_test.check_host_slices()


def test_pool_follows_the_environment(monkeypatch):
    monkeypatch.delenv(limits.LIMIT_VARIABLE, raising=False)
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", raising=False)
    assert limits.pinned_pool_bytes("cuda") == 64 * GIB
    assert limits.pinned_pool_bytes("cpu") is None
    assert limits.pinned_pool_bytes() is None
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", "true")
    assert limits.pinned_pool_bytes("gpu") == 16 * GIB
    monkeypatch.setenv(limits.LIMIT_VARIABLE, "900")
    assert limits.pinned_pool_bytes("gpu") == 900 * GIB
    monkeypatch.setenv(limits.LIMIT_VARIABLE, "many")
    assert limits.pinned_pool_bytes("gpu") == 16 * GIB


def meminfo(monkeypatch, tmp_path, gib):
    path = tmp_path / "meminfo"
    if gib is not None:
        path.write_text(
            f"MemTotal: {4 * gib << 20} kB\nMemFree: 1 kB\nMemAvailable:   {gib << 20} kB\n"
        )
    monkeypatch.setattr(limits, "_MEMINFO", path)


@pytest.mark.parametrize(
    ("platform", "gib", "most"),
    [
        ("gpu", 100, 64 * GIB),
        ("gpu", 20, 20 * GIB),
        ("gpu", None, 64 * GIB),
        ("cpu", 100, 100 * GIB),
    ],
)
def test_allocations_are_refused_one_byte_beyond_the_limit(
    monkeypatch, tmp_path, platform, gib, most
):
    monkeypatch.delenv(limits.LIMIT_VARIABLE, raising=False)
    meminfo(monkeypatch, tmp_path, gib)
    limits.check_host_memory(most, platform)
    with pytest.raises(
        RuntimeError, match=rf"no room for {most + 1} bytes \([\d.]+ GiB\) of pinned host memory"
    ) as e:
        limits.check_host_memory(most + 1, platform)
    advised = f"set {limits.LIMIT_VARIABLE}=" in str(e.value)
    assert advised == (
        most == 64 * GIB
    )  # a larger pool does not help on a machine that is too small


def test_a_machine_whose_memory_grows_has_what_its_user_says(monkeypatch, tmp_path):
    meminfo(monkeypatch, tmp_path, 5)  # 15 of 20 GiB are taken
    monkeypatch.setenv(limits.HOST_VARIABLE, "100")
    assert limits.available_bytes() == 85 * GIB
    monkeypatch.setenv(limits.HOST_VARIABLE, "16")
    assert limits.available_bytes() == 5 * GIB
    monkeypatch.setenv(limits.HOST_VARIABLE, "much")
    with pytest.raises(
        ValueError, match="ZEROJAX_HOST_MEMORY_GB='much': a number of GiB is needed"
    ):
        limits.available_bytes()


def test_a_machine_that_says_nothing_has_no_limit_on_the_cpu(monkeypatch, tmp_path):
    meminfo(monkeypatch, tmp_path, None)
    limits.check_host_memory(1 << 60, "cpu")


@pytest.mark.parametrize(
    ("gib", "group", "found"),
    [(5, None, 20 * GIB), (5, "max\n", 20 * GIB), (5, f"{GIB}\n", GIB), (None, None, None)],
)
def test_the_host_has_what_its_control_group_allows(monkeypatch, tmp_path, gib, group, found):
    meminfo(monkeypatch, tmp_path, gib)
    path = tmp_path / "memory.max"
    if group is not None:
        path.write_text(group)
    monkeypatch.setattr(limits, "_GROUP_LIMITS", (path, tmp_path / "none"))
    assert limits.host_bytes() == found


def test_a_real_allocation_that_fails_is_explained():
    num_bytes = 1 << 44
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    with pytest.raises(jax.errors.JaxRuntimeError) as e:
        jax.numpy.zeros(num_bytes, jax.numpy.int8, device=host)
    explained = limits.host_memory_error(e.value, num_bytes)
    assert isinstance(explained, RuntimeError)
    assert str(explained).startswith(
        f"no room for {num_bytes} bytes (16384.0 GiB) of pinned host memory in this process"
    )
    assert "keep less on the host" in str(explained)


@pytest.mark.parametrize(
    ("error", "explained"),
    [
        (
            RuntimeError(
                "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 1 bytes with allocator xla_gpu_host_bfc"
            ),
            True,
        ),
        (
            RuntimeError(
                "INTERNAL: Failed to allocate 1.0KiB (1024 bytes) of pinned host memory: CUDA_ERROR_OUT_OF_MEMORY"
            ),
            True,
        ),
        (
            RuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes with allocator GPU_0_bfc"
            ),
            False,
        ),
        (RuntimeError("INVALID_ARGUMENT: no"), False),
        (ValueError("RESOURCE_EXHAUSTED"), False),
    ],
)
def test_errors_about_something_else_are_left_alone(error, explained):
    assert (limits.host_memory_error(error, 2 * GIB, "gpu") is not None) == explained

"""A batch is copied before it is placed, and unsupported values are refused by name."""

import jax
import numpy as np
import pytest

import zerojax as zj
from zerojax.sharding import abstract_batch, place_any_batch, place_batch


def aligned(rows, length, dtype=np.int32):
    """Return an array of zeros that begins at a multiple of 64 bytes.

    JAX would use its memory as a device's.
    """
    size = rows * length * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(rows, length)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("how", ["place_batch", "place_any_batch", "padded"])
def test_an_array_that_is_filled_again_leaves_the_placed_batch_as_it_was(how, devices):
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    place = {"place_batch": lambda batch: place_batch(batch, mesh, 1)}.get(
        how, lambda batch: place_any_batch(batch, mesh)[0]
    )
    rows = devices + 1 if how == "padded" else 4 * devices
    # Small and large: the size decides whether JAX copies immediately, uses the array in place, or
    # reads it later.
    batch = {
        "small": aligned(rows, 16),
        "large": aligned(rows, 1 << 16),
        "number": np.zeros((), np.float32),
    }
    placed = place(batch)
    for array in batch.values():
        array[...] = 7
    for name, array in placed.items():
        assert not np.asarray(array).any(), name


def test_an_array_of_jax_on_the_mesh_is_not_copied():
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    placed = place_batch({"x": np.zeros((4, 8), np.float32)}, mesh, 1)
    assert place_batch(placed, mesh, 1)["x"] is placed["x"]


REFUSED = {
    "text": (np.array(["a", "b"]), "<U1"),
    "objects": (np.array([None, 1]), "object"),
    "dates": (np.array(["2020-01-01"] * 2, "M8[s]"), "datetime64"),
    "records": (np.zeros(2, [("a", "i4")]), "'a'"),
    "long-floats": (np.zeros(2, np.longdouble), "float128"),
    "large": (np.array([0, -(2**31) - 1]), "-2147483649"),
    "large-unsigned": (np.array([0, 2**32], np.uint64), "4294967296"),
    "number": (2**40, "1099511627776"),
    "word": ("abc", "str"),
    "function": (len, "builtin_function_or_method"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_device_holds_is_refused_by_name(name):
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    leaf, word = REFUSED[name]
    for place in (
        lambda batch: place_batch(batch, mesh, 1),
        lambda batch: place_any_batch(batch, mesh),
    ):
        with pytest.raises(ValueError, match=r"\['wrong'\]") as error:
            place({"x": np.zeros(2), "wrong": leaf})
        assert word in str(error.value)


def test_a_deleted_array_and_keys_of_two_kinds_are_refused():
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    gone = jax.numpy.zeros(2)
    gone.delete()
    with pytest.raises(ValueError, match=r"\['x'\] of the batch was deleted"):
        place_batch({"x": gone}, mesh, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        place_batch({"x": np.zeros(2), 3: np.zeros(2)}, mesh, 1)


def test_numbers_of_other_widths_and_byte_orders_keep_their_values():
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    numbers = np.arange(-3, 5)
    for dtype in (">i2", ">i4", "<i8", ">f4", ">f8"):
        placed = place_batch({"x": numbers.astype(dtype)[::-1]}, mesh, 1)["x"]
        np.testing.assert_array_equal(placed, numbers[::-1])
        assert placed.dtype == abstract_batch({"x": numbers.astype(dtype)}, mesh)["x"].dtype

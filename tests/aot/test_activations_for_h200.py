"""A layer's saved activations in programs compiled for absent H200s.

The tests count bytes of the loops' stacks, temporaries and products. The layer is the example's GPT
block. No other size in the program equals the number of rows or layers, so the first two dims
identify the stacks.
"""

import dataclasses
import functools
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax as zj
from zerojax import aot, hlo, memory

pytestmark = pytest.mark.xdist_group("h200")
ROWS, LAYERS = 3, 5
SIZES = {"seq": 256, "hidden": 512, "heads": 8, "vocab": 256, "loss_tiles": 0}


@functools.cache
def compiled(
    activations,
    tensor=1,
    layers=LAYERS,
    precision="bf16",
    form="layered",
    preset=None,
    attention: Any = "xla",
    **fields,
):
    of_axis = {
        "layers": layers,
        "dtype": jnp.bfloat16,
        "tensor_axis": "tensor" if tensor > 1 else None,
    }
    sizes = gpt.GPTConfig(**SIZES) if preset is None else gpt.PRESETS[preset]
    c = dataclasses.replace(sizes, loss_tiles=0, attention=attention, **of_axis)
    mesh = aot.gpu_mesh("h200", hosts=1, gpus_per_host=tensor, fsdp=1, tensor=tensor)
    model = {"layered": gpt.layered_gpt, "unrolled": gpt.unrolled_gpt}[form](c)
    config = zj.ZeroConfig(stage=1, precision=precision, activations=activations, **fields)
    program = zj.build_train_step(model, optax.sgd(1e-3), config, mesh)
    tokens = jax.ShapeDtypeStruct((ROWS, c.seq), jnp.int32)
    batch = program.abstract_batch({"tokens": tokens, "targets": tokens})
    return program.lower(batch).compile(), program.kept(batch), program


def fused(activations, attention, **settings):
    """Return a step's forward and backward cuDNN calls, and its bytes besides arguments."""
    program, kept, _ = compiled(activations, attention=attention, **settings)
    text = program.as_text()
    calls = [
        text.count(f'custom_call_target="__cudnn$fmhaSoftmax{kind}"') for kind in ("", "Backward")
    ]
    of_layers = sum(value.num_bytes for value in kept if value.count == LAYERS) / LAYERS
    return calls, program.memory_analysis().temp_size_in_bytes, of_layers


# With "save", each call runs once per layer. Otherwise backward repeats the forward call: its
# logsumexp is not a product, and not saved.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("activations", "fields", "tensor"),
    [
        (activations, fields, tensor)
        for activations in ("save", "selective", "remat")
        for fields, tensor in (
            ({}, 1),
            ({"sequence_parallel": True}, 4),
            ({"update": "in_backward"}, 1),
            ({"update": "in_backward"}, 4),
            ({"form": "unrolled"}, 1),
        )
        if (activations, fields)
        != ("selective", {"form": "unrolled"})  # which needs to know the layers
    ],
)
def test_cudnns_attention_compiles_and_its_scores_are_nowhere(activations, fields, tensor):
    calls, temp, kept = fused(activations, "cudnn", tensor=tensor, **fields)
    none, temp_of_xla, kept_of_xla = fused(activations, "xla", tensor=tensor, **fields)
    assert none == [0, 0]
    layers = LAYERS if "form" in fields else 1
    streams = "update" in fields
    if not streams:  # a streamed step runs its first and last ticks outside the loops
        assert calls == [(1 if activations == "save" else 2) * layers, layers]
    assert min(calls) >= 1
    scores = 4 * ROWS * SIZES["heads"] // tensor * SIZES["seq"] ** 2
    logsumexp = 4 * ROWS * SIZES["heads"] // tensor * SIZES["seq"]
    assert temp < temp_of_xla
    if activations == "save":
        assert temp_of_xla - temp >= scores
    if not streams and "form" not in fields:  # the heads of cuDNN's outputs are known to be split
        assert kept == pytest.approx(
            kept_of_xla - (scores - logsumexp if activations == "save" else 0), rel=0.01
        )


def stack_bytes(text, layers=LAYERS):
    """Return the bytes of a layer's arrays that the loop over layers carries.

    Parameters and gradients do not count.
    """

    def is_kept(dims):
        return dims[:1] == (layers,) and ROWS in dims[1:3]

    return (
        max(
            sum(a.num_bytes for a in arrays if is_kept(a.dims))
            for arrays in hlo.carried_arrays(text)
        )
        / layers
    )


def closed_form(activations, tensor=1):
    return memory.layer_activation_bytes(
        SIZES["seq"], ROWS, SIZES["hidden"], SIZES["heads"], tensor=tensor, activations=activations
    )


@pytest.mark.exhaustive  # by default test_kept.py compares the closed form with traced derivatives
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("activations", ["save", "selective", "remat"])
def test_bytes_kept_a_layer_are_the_closed_form(activations, tensor):
    program, kept, _ = compiled(activations, tensor, LAYERS)
    expected = closed_form(activations, tensor)
    assert stack_bytes(program.as_text()) == pytest.approx(expected, rel=0.01)
    of_layers = sum(value.num_bytes for value in kept if value.count == LAYERS) / LAYERS
    assert of_layers == pytest.approx(expected, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("split", ["", "sequence_parallel", "partition_activations"])
@pytest.mark.parametrize("activations", ["save", "selective", "remat"])
@pytest.mark.parametrize("preset", ["22b", "175b"])
def test_layers_of_the_paper_keep_the_closed_form_and_no_more_than_the_papers(
    preset, activations, split, tensor
):
    """Korthikanti et al. (arXiv:2205.05198), table 3: a + h is such that both terms count."""
    by_config = {split: True} if split else {}
    program, _, _ = compiled(activations, tensor, preset=preset, **by_config)
    c = gpt.PRESETS[preset]
    sizes, given = (c.seq, ROWS, c.hidden, c.heads), {"tensor": tensor, "activations": activations}
    found = stack_bytes(program.as_text())
    assert found == pytest.approx(
        memory.layer_activation_bytes(*sizes, **given, **by_config), rel=0.01
    )
    # In the paper, nothing is saved split without sequence parallelism.
    sequence_parallel = split == "sequence_parallel"
    assert found <= 1.0001 * memory.korthikanti_layer_bytes(
        *sizes, **given, sequence_parallel=sequence_parallel
    )


def growth(activations, **fields):
    """Return the temporary bytes that one more layer adds."""
    few, many = (
        compiled(activations, layers=n, **fields)[0].memory_analysis().temp_size_in_bytes
        for n in (8, 16)
    )
    return (many - few) / 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["save", "remat"])
def test_temporary_bytes_grow_by_it(activations):
    """One more layer adds its saved activations and its gradients."""
    h = SIZES["hidden"]
    grads = 2 * (12 * h * h + 13 * h)
    assert growth(activations) - grads == pytest.approx(closed_form(activations), rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.parametrize("activations", ["save", "selective"])
def test_temporary_bytes_of_streamed_steps_grow_by_it(activations):
    """No stack is copied.

    When updated in backward, a layer's gradients are freed before the next layer's are computed.
    """
    assert growth(activations, update="in_backward") == pytest.approx(
        closed_form(activations), rel=0.05
    )


# Backward has two products for each of a block's six. No derivative reads the result of the last
# one.
@pytest.mark.exhaustive  # by default test_kept.py counts the products of traced derivatives
@pytest.mark.parametrize(("activations", "each"), [("save", 18), ("selective", 19), ("remat", 23)])
def test_no_product_runs_twice_in_save_the_scores_do_in_selective_and_forward_does_in_remat(
    activations, each
):
    few, many = (
        hlo.num_products(compiled(activations, 8, n)[0].as_text(), unknown_trips=n)
        for n in (3, LAYERS)
    )
    assert many - few == (LAYERS - 3) * each

"""Programs that are compiled once read what is on disk.

Records name their contents, and a tier may have none.
"""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import zerojax as zj
from zerojax.state.train_state import OnDisk, is_stored

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}


def build(swap_dir, tx=None, model=None, **fields):
    config = zj.ZeroConfig(stage=3, swap_dir=str(swap_dir), **{**ALL, **fields})
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    return zj.build_train_step(
        model or toys.layered(), toys.optimizer() if tx is None else tx, config, mesh
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_read_again_compile_nothing(tmp_path, caplog, precision):
    with build(tmp_path, optax.adamw(1e-2), toys.small(), precision=precision) as program:
        state = program.init(jax.random.key(0))
        compiled, params = [], {}
        for _ in range(2):
            caplog.clear()
            with jax.log_compiles(), caplog.at_level(logging.WARNING):
                params = jax.device_get(dict(program.iter_params(state)))
            compiled.append(
                [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]
            )
        assert len(compiled[0]) >= len(jax.tree.leaves([params["embed"], params["head"]]))
        assert compiled[1] == []


def test_records_name_each_leaf_by_its_path(tmp_path):
    with build(tmp_path, precision="bf16") as program:
        state = program.init(jax.random.key(0))
        (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
        manifests = [
            json.loads(path.read_text())["attributes"] for path in folder.glob("*/0/zarr.json")
        ]
        found = {
            manifest["kind"]: [leaf["name"] for leaf in manifest["leaves"]]
            for manifest in manifests
        }
        paths = [
            [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_stored)
             if isinstance(leaf, OnDisk)]
            for tree in (state.params, state.master, state.opt_state)
        ]  # fmt: skip
    params, masters, moments = paths
    assert found["params"] == [name for name in params if "['blocks']" in name]
    assert found["opt_state"] == [name for name in (*masters, *moments) if "['blocks']" in name]
    alone = [
        name
        for kind, names in found.items()
        if kind not in ("params", "opt_state")
        for name in names
    ]
    assert sorted(alone) == sorted(
        name for tree in paths for name in tree if "['blocks']" not in name
    )
    assert {f"[0].inner_state[0].{m}['blocks']['w1']" for m in ("mu", "nu")} <= set(moments)


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        ({"opt_state": DISK}, True),
        ({"opt_state": "pinned_host"}, True),
        ({"opt_state": "device"}, False),
        ({"opt_state": DISK, "precision": "bf16"}, False),
    ],
)
def test_an_optimizer_with_nothing_to_keep_is_warned_of(tmp_path, caplog, fields, warns):
    build(tmp_path, tx=optax.sgd(0.1), **fields).close()
    told = [r.getMessage() for r in caplog.records if "keeps nothing there" in r.getMessage()]
    assert len(told) == warns
    assert all(f"opt_state={fields['opt_state']!r}" in message for message in told)
    caplog.clear()
    build(tmp_path, tx=optax.sgd(0.1, momentum=0.9), **fields).close()
    assert "keeps nothing there" not in caplog.text


def test_leaves_on_disk_count_as_parameters_and_take_part_in_no_arithmetic(tmp_path):
    with build(tmp_path, optax.adamw(1e-2), toys.small()) as program:
        state = program.init(jax.random.key(0))
        params, expected = program.params(state), program.layout.abstract_params
        for tree in (params, state.params, program.master_params(state)):
            assert sum(x.size for x in jax.tree.leaves(tree)) == sum(
                x.size for x in jax.tree.leaves(expected)
            )
            assert [(x.shape, x.dtype, x.ndim, x.nbytes) for x in jax.tree.leaves(tree)] == [
                (x.shape, x.dtype, x.ndim, 4 * x.size) for x in jax.tree.leaves(expected)
            ]
        leaf = params["blocks"]["w"]
        for compute in (
            lambda: jax.tree.map(lambda e, p: 0.99 * e + 0.01 * p, params, params),
            lambda: jax.tree.map(lambda x: x + np.float32(1), params),
            lambda: jnp.ones(3) * leaf,
            lambda: -leaf,
            lambda: leaf.mean(),
            lambda: leaf[0],
            lambda: leaf @ leaf,
            lambda: jnp.sum(leaf),
            lambda: np.mean(leaf),
            lambda: jax.jit(lambda x: x * 2)(leaf),
            lambda: jax.device_put(leaf),
            lambda: jax.device_get(params),
            lambda: optax.global_norm(params),
            lambda: jax.tree.map(jnp.copy, state),
        ):
            with pytest.raises(
                (TypeError, ValueError, AttributeError),
                match=r"is stored on disk.*program\.iter_params\(state\)",
            ):
                compute()
        copied = jax.tree.map(lambda leaf: leaf.copy(), state)
        assert float(program.eval(copied, toys.batches(1)[0])) == float(
            program.eval(state, toys.batches(1)[0])
        )
        # and the state is unchanged
        state, _ = program.step(jax.block_until_ready(state), toys.batches(1)[0])
        assert np.isfinite(float(program.eval(state, toys.batches(1)[0])))
        zeros = jax.tree.map(jnp.zeros_like, program.params(state))
        assert jax.tree.map(jnp.shape, zeros) == jax.tree.map(lambda x: x.shape, expected)

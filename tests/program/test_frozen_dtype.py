"""Frozen weights in 8 and 4 bits.

Training equals training with the decoded weights, and storage and reads count encoded bytes.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec as P

import zerojax as zj
from pallas_kernels.storage import abstract_encoded, choose_layout, decode, encode
from zerojax.models import init_params

LAYERS, HIDDEN, INNER, VOCAB, BATCH, STEPS = 2, 16, 512, 64, 8, 8
HOST, DISK = "pinned_host", "nvme"
FROZEN = {
    "embed": True,
    "block": {"up": True, "down": True, "shift": True, "lora": False},
    "head": {"out": True, "bias": False},
}
ENCODED = {
    "['embed']['table']": 0,
    "['blocks']['up']": 0,
    "['blocks']['down']": 0,
    "['head']['out']": 0,
}
"""Leaves that both formats encode on two devices, and the dim of one layer's leaf that is split."""
UNROLLED = ENCODED | {"['blocks']['up']": 1}
"""The same leaves in a model of unstacked layers, where the largest dim is split."""
CASES = {
    "stage_0": {"stage": 0},
    "stage_1": {"stage": 1},
    "stage_2": {"stage": 2, "num_microbatches": 2},
    "stage_3": {"stage": 3},
    "remat": {"activations": "remat", "num_microbatches": 2},
    "base_on_host": {"frozen": HOST},
    "base_on_disk": {"frozen": DISK, "num_microbatches": 2},
    "ahead": {"frozen": HOST, "gather_ahead": True, "prefetch_distance": 2},
    "base_alone_on_device": {"params": HOST, "opt_state": HOST, "grads": HOST, "frozen": "device"},
    "all_on_host": {"params": HOST, "opt_state": HOST, "grads": HOST, "activations": HOST},
    "all_on_disk": {"params": DISK, "opt_state": DISK, "grads": DISK},
    "in_backward": {"params": DISK, "opt_state": DISK, "update": "in_backward"},
    "on_the_host": {"params": HOST, "opt_state": HOST, "update_on": "host"},
}


def init_block(key):
    draw = lambda leaf, *shape: toys.draw(key, shape, leaf) / math.sqrt(shape[0])  # noqa: E731
    base = {
        "up": draw(0, HIDDEN, INNER),
        "down": draw(1, INNER, HIDDEN),
        "shift": jnp.full(HIDDEN, 0.1),
    }
    return base | {"lora": {"a": draw(2, HIDDEN, 2), "b": jnp.zeros((2, INNER))}}


def block(p, x, key):
    y = (x + p["shift"]) @ p["up"] + (x @ p["lora"]["a"]) @ p["lora"]["b"]
    return x + jnp.tanh(y) @ p["down"]


def embed(p, batch, key):
    return p["table"][batch["tokens"]]


def init_head(key):
    return {"out": toys.draw(key, (HIDDEN, VOCAB)).T.copy() / 4, "bias": jnp.zeros(VOCAB)}


def head(p, p_embed, x, batch, key):
    logits = (x @ p["out"].T + p["bias"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))


def init_embed(key):
    return {"table": toys.draw(key, (VOCAB, HIDDEN))}


def predict(p, p_embed, x, batch):
    return x @ p["out"].T + p["bias"]


MODEL = zj.LayeredModel(
    LAYERS, init_embed, embed, init_block, block, init_head, head, frozen=FROZEN, predict=predict
)


def unrolled():
    def init(key):
        params = init_params(MODEL, key)
        layers = [jax.tree.map(lambda a, i=i: a[i], params["blocks"]) for i in range(LAYERS)]
        return params | {"blocks": layers}

    def loss(params, batch, key):
        x = embed(params["embed"], batch, key)
        for p in params["blocks"]:
            x = block(p, x, key)
        return head(params["head"], params["embed"], x, batch, key)

    predict = lambda params, batch: embed(params["embed"], batch, None)  # noqa: E731
    return zj.Model(
        init,
        loss,
        predict=predict,
        frozen={"embed": True, "blocks": [FROZEN["block"]] * LAYERS, "head": FROZEN["head"]},
    )


@functools.cache
def batches():
    random = np.random.default_rng(0)
    draw = lambda: random.integers(0, VOCAB, (BATCH, 3))  # noqa: E731
    return [{"tokens": draw(), "targets": draw()} for _ in range(STEPS)]


@pytest.mark.parametrize("is_layered", [True, False], ids=["layered", "unrolled"])
def test_the_account_of_tensor_parallelism_knows_encoded_leaves(is_layered):
    """Transfers over `tensor` and saved activations have the same dtype in every base dtype."""
    specs = {r"up": P(None, "tensor"), r"down": P("tensor", None)}
    model = zj.with_specs(
        MODEL if is_layered else unrolled(),
        {rf"block/{k}" if is_layered else k: v for k, v in specs.items()},
    )
    mesh, batch, found = zj.make_mesh(tensor=2, devices=jax.devices()[:2]), batches()[0], []
    for dtype in (None, "int8"):
        with zj.build_train_step(
            model, optax.adamw(1e-2), zj.ZeroConfig(frozen_dtype=dtype), mesh
        ) as program:
            sent = program.memory(batch).collectives
            kept = [(value.name, value.num_bytes) for value in program.kept(batch)]
        found.append(({name: n for name, n in sent.items() if name.startswith("tensor")}, kept))
    assert found[0][0]["tensor_all_reduce"] > 0
    assert found[1] == found[0]


def rounded(params, format, sharded, dims):
    """Return the base after it was encoded and decoded, by the codec alone."""

    def one(path, w):
        dim = dims.get(jax.tree_util.keystr(path))
        if dim is None:
            return w
        shape = w.shape[1:] if path[0].key == "blocks" else w.shape
        shards = tuple(2 if sharded and d == dim else 1 for d in range(len(shape)))
        return decode(encode(w, choose_layout(format, shape, shards)), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def expected(format, sharded, unrolled=False):
    """Train on one device with optax alone.

    The weights were encoded and decoded, and the base is not updated.
    """
    dims = UNROLLED if unrolled else ENCODED
    params = jax.device_put(
        rounded(init_params(MODEL, jax.random.key(0)), format, sharded, dims), jax.devices()[0]
    )
    flags = {"embed": FROZEN["embed"], "blocks": FROZEN["block"], "head": FROZEN["head"]}
    labels = jax.tree.map(
        lambda f, sub: jax.tree.map(lambda _: "f" if f else "t", sub), flags, params
    )
    tx = optax.multi_transform({"t": optax.adamw(1e-2), "f": optax.set_to_zero()}, labels)

    def loss(params, batch):
        x = embed(params["embed"], batch, None)
        for i in range(LAYERS):
            x = block(jax.tree.map(lambda a, i=i: a[i], params["blocks"]), x, None)
        return head(params["head"], None, x, batch, None)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for batch in batches():
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return losses, jax.device_get(params)


def build(format, tmp_path, /, model=MODEL, devices=2, **fields):
    config = zj.ZeroConfig(
        frozen_dtype=format, swap_dir=str(tmp_path) if DISK in fields.values() else None, **fields
    )
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(model, optax.adamw(1e-2), config, mesh)


@pytest.mark.xdist_group("frozen_dtype")  # one reference for both formats
@pytest.mark.by_default("nf4-stage_3")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_training_equals_that_of_the_decoded_weights(format, case, tmp_path):
    with build(format, tmp_path, **CASES[case]) as program:
        assert set(program.layout.encodings) == set(ENCODED)
        state, losses, swapped = program.init(jax.random.key(0)), [], []
        for batch in batches():
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses.append(float(metrics["loss"]))
            swapped.append(metrics.get("swap_write_bytes", 0))
        plain_losses, plain = expected(format, program.config.stage == 3)
        np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
        pieces = dict(program.iter_params(state))
        for layer in range(LAYERS):
            of_layer = jax.tree.map(lambda a, layer=layer: a[layer], plain["blocks"])
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
                pieces[f"blocks/{layer}"],
                of_layer,
            )
        for part in ("embed", "head"):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), pieces[part], plain[part]
            )
        x = np.asarray(plain["embed"]["table"])[batches()[0]["tokens"]]
        for layer in range(LAYERS):
            x = block(jax.tree.map(lambda a, layer=layer: a[layer], plain["blocks"]), x, None)
        np.testing.assert_allclose(
            program.apply(state, batches()[0]), predict(plain["head"], None, x, None), atol=1e-3
        )
        if program.layout.disk is not None:
            moves, kinds = program._moves, program.layout.disk.kinds
            assert not [m for m in moves if m.writes and m.kind.startswith("frozen")]
            written = sum(kinds[m.kind].num_bytes for m in moves if m.writes) * program.mesh.size
            # A step's last writes may be counted by the next step. Writing the base would take 7
            # times as many bytes.
            assert abs(sum(swapped[1:]) - (STEPS - 1) * written) <= written


BYTES = {"int8": 1 + 4 / 256, "nf4": 0.5 + 1 / 64}
"""Bytes per element, without nf4's steps and means.

Those take 8 bytes per group of 256 blocks, or of fewer blocks that divide a shard's.
"""


def parts_of(layout):
    """Return the elements of the encoded stacks, and of the encoded unstacked leaves."""
    of = [leaf.decodes for leaf in layout.frozen if leaf.decodes is not None]
    return (
        sum(math.prod(a.shape) for a in of if a.is_stacked == stacked) for stacked in (True, False)
    )


@pytest.mark.parametrize("format", BYTES)
def test_the_base_takes_the_bytes_of_its_codes_and_is_read_twice(format, tmp_path):
    with build(format, tmp_path, frozen=HOST, precision="bf16") as program:
        layers, ends = parts_of(program.layout)
        report, stats = (
            program.memory(batches()[0]),
            program.lower(batches()[0]).compile().memory_analysis(),
        )
        kept = 2 * LAYERS * HIDDEN  # a vector of each layer, in bfloat16
        held = 2 * report.tiers[HOST]["frozen"] - kept  # on two devices
        groups = {"int8": 0, "nf4": 8 * (layers + ends) / 64 / 4}[
            format
        ]  # of 4 blocks at least, in this small model
        assert BYTES[format] * (layers + ends) <= held <= BYTES[format] * (layers + ends) + groups
        assert report.argument_bytes + report.host_argument_bytes == stats.argument_size_in_bytes
        # Forward and backward read each layer; unstacked leaves are read once.
        read = 2 * report.host_link["to_device"] - 2 * kept
        assert 2 * BYTES[format] * layers + BYTES[format] * ends <= read <= 2 * held
        assert report.host_link["to_host"] == 0
        assert program.replicated == ()


@pytest.mark.parametrize("format", BYTES)
def test_bytes_of_a_large_weight(format):
    layout = choose_layout(format, (4096, 11008), (8, 1))
    held = sum(
        a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract_encoded(layout, (4096, 11008)))
    )
    assert (
        {"int8": 1.015, "nf4": 0.516}[format]
        < held / (4096 * 11008)
        < {"int8": 1.02, "nf4": 0.5165}[format]
    )


@pytest.mark.xdist_group("frozen_dtype")
@pytest.mark.exhaustive  # by default a layered model covers this
@pytest.mark.parametrize("case", ["stage_0", "stage_3", "remat"])
def test_a_model_without_layers_decodes_each_weight_where_it_is_used(case, tmp_path):
    with build("nf4", tmp_path, unrolled(), **CASES[case]) as program:
        assert len(program.layout.encodings) == 2 + 2 * LAYERS
        state, losses = program.init(jax.random.key(0)), []
        for batch in batches():
            state, metrics = jax.block_until_ready(program.step(state, batch))
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(
            losses, expected("nf4", program.config.stage == 3, unrolled=True)[0], rtol=1e-5
        )
        assert program.gathered_early == ()
        pieces = dict(program.iter_params(state))
        assert next(iter(pieces)) == "['blocks'][0]['down']"
        table = pieces["['embed']['table']"]
        np.testing.assert_allclose(
            program.apply(state, batches()[0]), table[batches()[0]["tokens"]], rtol=1e-6
        )

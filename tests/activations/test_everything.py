"""`activations="everything"` keeps all that JAX keeps, and backward recomputes nothing."""

import dataclasses
import re
from typing import Any

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiled_toys
import toys
from jax.ad_checkpoint import checkpoint_name

import zerojax as zj
from zerojax import memory
from zerojax.costs import traced

HOST = "pinned_host"
S = zj.Segment
GPT = {"vocab": 32, "seq": 32, "hidden": 32, "layers": 2, "heads": 4, "loss_tiles": 0}


def build(model: Any, tx: Any = None, devices: int = 2, **fields: Any) -> zj.Program:
    mesh = zj.make_mesh(fsdp=devices, devices=jax.devices()[:devices])
    return zj.build_train_step(
        model, tx or optax.adam(1e-2, eps=1e-4), zj.ZeroConfig(**fields), mesh
    )


def trained(program: zj.Program, data: Any) -> tuple[np.ndarray, Any]:
    losses, state = toys.run(program, program.init(jax.random.key(0)), data)
    return np.asarray(losses, np.float32), jax.device_get(program.params(state))


def gpt_batches(count: int, rows: int = 8) -> list[Any]:
    random = np.random.default_rng(0)
    draw = lambda: random.integers(0, GPT["vocab"], (rows, GPT["seq"])).astype(np.int32)  # noqa: E731
    return [{"tokens": draw(), "targets": draw()} for _ in range(count)]


def dropping() -> zj.LayeredModel:
    """Return a model whose block has many kinds of values to keep.

    They are scaled and transposed weights, a random mask, a loop and two names.
    """

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        y = checkpoint_name(jax.nn.gelu(x @ (0.5 * p["up"])), "hidden")
        if key is not None:
            y = jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y / 0.8, 0)
        y = checkpoint_name(y @ p["down"].T, "out")
        y, _ = jax.lax.scan(lambda y, _: (jnp.tanh(y @ p["mix"]), None), y, None, length=2)
        return x + y

    def init_block(key: jax.Array) -> Any:
        shape = (toys.HIDDEN, toys.INNER)
        mix = toys.draw(key, (toys.HIDDEN, toys.HIDDEN), 2) / 8
        return {"up": toys.draw(key, shape) / 4, "down": toys.draw(key, shape, 1) / 6, "mix": mix}

    return dataclasses.replace(toys.small(), init_block=init_block, block=block, stochastic=True)


CASES: dict[str, dict[str, Any]] = {
    "resident, stage 0": {"stage": 0},
    "resident, stage 3": {"stage": 3, "num_microbatches": 2},
    "streamed": {"params": HOST, "grads": HOST, "opt_state": HOST, "num_microbatches": 2},
    "streamed in bfloat16": {"gather_ahead": True, "precision": "bf16", "reduce_dtype": "float32"},
    "values in host memory": {"update": "in_backward", "offloaded_names": ("hidden",)},
    "segments": {
        "activations": (
            S(1, activations="everything", offloaded_names=("out",)),
            S(2, activations="remat"),
        )
    },
}


@pytest.mark.by_default("resident, stage 3", "segments")
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_the_one_that_computes_again(name: str) -> None:
    fields = {"activations": "everything"} | CASES[name]
    data = toys.batches(3)
    losses, params = trained(build(dropping(), **fields), data)
    expected, others = trained(
        build(dropping(), **{**fields, "activations": "remat", "offloaded_names": ()}), data
    )
    rtol, atol = (2e-2, 2e-2) if "precision" in fields else (1e-6, 2e-6)
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    toys.assert_trees_close(params, others, atol=atol)


def unrolled() -> zj.Model:
    return gpt.unrolled_gpt(gpt.GPTConfig(**GPT))


def layered() -> zj.LayeredModel:
    return gpt.layered_gpt(gpt.GPTConfig(**GPT))


@pytest.mark.by_default("unrolled, gathered", "streamed")
@pytest.mark.parametrize(
    ("model", "fields", "count"),
    [
        (unrolled, {"stage": 0}, 2),  # one in each layer
        (unrolled, {"stage": 3}, 2),
        (layered, {"stage": 3}, 1),  # one in the loop of forward
        (layered, {"params": HOST, "prefetch_distance": 0}, 1),
    ],
    ids=["unrolled", "unrolled, gathered", "layered", "streamed"],
)
def test_backward_evaluates_no_activation_again(model: Any, fields: Any, count: int) -> None:
    def tanhs(activations: Any) -> int:
        program = build(model(), optax.sgd(0.1), activations=activations, **fields)
        return len(
            re.findall(r" tanh\(", program.lower(gpt_batches(1)[0]).compile().as_text() or "")
        )

    assert tanhs("everything") == count
    assert tanhs("save") > count  # so that the count would show it


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_layer_are_the_closed_form(dtype: str) -> None:
    c = gpt.GPTConfig(**GPT, dtype=jnp.dtype(dtype))
    precision: Any = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    program = build(
        gpt.layered_gpt(c),
        activations="everything",
        precision=precision,
        update="in_backward",
        devices=1,
    )
    kept, batch = program.kept(gpt_batches(1)[0]), gpt_batches(1)[0]
    expected = memory.layer_activation_bytes(
        32, 8, 32, 4, activations="everything", itemsize=c.dtype.itemsize
    )
    assert kept.num_bytes == pytest.approx(
        2 * expected, rel=0.03
    )  # in addition to row statistics, which the estimate omits
    assert program.memory(batch).tiers["device"]["activations"] == kept.num_bytes


@pytest.mark.parametrize(
    "fields", [{"stage": 0}, {"update": "in_backward"}], ids=["resident", "streamed"]
)
def test_what_is_kept_is_what_the_compiled_step_takes_more(fields: Any) -> None:
    """The compiled step needs more memory than with remat, by what it keeps in addition."""
    c = gpt.GPTConfig(vocab=32, seq=64, hidden=64, layers=8, heads=4, loss_tiles=0)
    batch = {name: np.zeros((16, 64), np.int32) for name in ("tokens", "targets")}
    found: dict[Any, tuple[int, int]] = {}
    for activations in ("everything", "remat"):
        program = build(
            gpt.layered_gpt(c), optax.sgd(0.1), devices=1, activations=activations, **fields
        )
        temp = program.lower(batch).compile().memory_analysis().temp_size_in_bytes
        found[activations] = program.kept(batch).num_bytes, temp
    kept, temp = (found["everything"][n] - found["remat"][n] for n in (0, 1))
    assert temp == pytest.approx(kept, rel=0.1)


def test_nothing_of_the_parameters_is_kept() -> None:
    """A scaled weight is as large as the gathered layer.

    Keeping it would break ZeRO-3's bound on memory.
    """
    program = build(dropping(), activations="everything", params=HOST)
    weights = {(toys.HIDDEN, toys.INNER), (toys.INNER, toys.HIDDEN), (toys.HIDDEN, toys.HIDDEN)}
    kept = program.kept(toys.batches(1)[0])
    assert kept
    assert not [value for value in kept if value.shape[-2:] in weights]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"offloaded_names=\['#0'\]: the values that it keeps have no numbers",
    ):
        build(dropping(), activations="everything", offloaded_names=("#0",))
    program = build(dropping(), activations="everything", offloaded_names=("absent",))
    with pytest.raises(ValueError, match=r"name \['absent'\], which the block does not mark"):
        program.kept(toys.batches(1)[0])
    tiled = tiled_toys.model()
    with pytest.raises(
        NotImplementedError, match="for layers whose tiles are stored off the device: use 'save'"
    ):
        build(tiled, activations="everything", params=HOST)


def averaging() -> zj.LayeredModel:
    """Return a model whose block averages its input twenty times.

    The averages are cheap to keep, and each costs a pass over memory to recompute.
    """

    def block(p: Any, x: jax.Array, key: Any) -> jax.Array:
        del key
        for _ in range(20):
            x = x + 0.01 * jnp.tanh(jnp.mean(x, -1, keepdims=True))
        return x + jnp.tanh(x @ p["w"])

    return dataclasses.replace(
        toys.small(), init_block=lambda key: {"w": toys.draw(key, (toys.HIDDEN,) * 2)}, block=block
    )


MACHINE = zj.Machine(
    name="m", device_bytes=2**34, host_bytes=2**34, flops={"fp32": 1e13}, memory_rate=1e11, link_up=1e9, link_down=1e9,
    link_both=1e9,
)  # fmt: skip


@pytest.mark.exhaustive  # by default the test below plans with it
def test_a_plan_leaves_it_out_where_tiles_are_off_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced, "is_there", lambda mesh: False)
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
    plan = zj.plan(
        tiled_toys.model(),
        optax.adam(1e-3),
        mesh,
        tiled_toys.batches(1)[0],
        MACHINE,
        fixed={"params": HOST},
    )
    assert plan.config.activations != "everything"
    assert any("activations='everything' is not considered" in note for note in plan.notes)


def test_a_plan_takes_it_where_it_saves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        traced, "is_there", lambda mesh: False
    )  # so that seconds are computed from the machine's rates
    mesh, batch = zj.make_mesh(fsdp=1, devices=jax.devices()[:1]), toys.batches(1, 512)[0]
    plans = [
        zj.plan(model, optax.adam(1e-3), mesh, batch, MACHINE)
        for model in (averaging(), toys.small())
    ]
    assert [plan.config.activations for plan in plans] == ["everything", "save"]
    program = zj.build_train_step(averaging(), optax.adam(1e-3), plans[0].config, mesh)
    assert plans[0].bytes["device"]["activations"] == program.kept(batch).num_bytes

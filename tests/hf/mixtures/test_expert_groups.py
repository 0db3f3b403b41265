"""Experts in groups: they train like one group, in every tier, and a forward reads those it visits."""

import contextlib
import functools
import math

import jax
import mixture_models
import numpy as np
import optax
import pytest
from hf_models import need
from plain_mixtures import SIZES, batch_of, write_mixture
from safetensors.numpy import load_file

import zerojax as zj
from zerojax.costs import traced
from zerojax.hf import model_of
from zerojax.hf.mixtures import block as mixture_block

LORA = zj.Lora(rank=4, alpha=8, targets=("q_proj", "v_proj"))
EXPERTS = "mlp.experts"
TX = optax.sgd(0.05, momentum=0.9)
BASES = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "int8": {"frozen_dtype": "int8"},
    "nf4": {"frozen_dtype": "nf4"},
}
TIERS = ("device", "pinned_host", "nvme")
FIXED = (
    "stage",
    "params",
    "grads",
    "opt_state",
    "frozen",
    "frozen_dtype",
    "swap_dir",
    "precision",
    "activations",
)
MACHINE = zj.Machine(
    name="toy", device_bytes=10**9, host_bytes=10**12, disk_bytes=10**12, flops={"fp32": 1e11, "bf16": 1e11},
    memory_rate=1e10, link_up=1e10, link_down=1e10, link_both=2e10, disk_read=3e9, disk_write=3e9, disk_both=3e9,
    host_kernel=2e10, devices_per_node=2, network_in_node=1e10, network_between_nodes=1e10,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # 16,384 numbers a matrix, so that no group of nf4's scales crosses two experts.
    path = tmp_path_factory.mktemp("mixture") / "model"
    write_mixture(path, hidden_size=128, moe_intermediate_size=128)
    return path


@contextlib.contextmanager
def program_of(folder, groups, swap, fsdp=1, lora=LORA, axes=None, **fields):
    """Return a program of the folder's model and its state."""
    if "nvme" in fields.values():
        fields["swap_dir"] = str(swap)
    model = model_of(folder, lora=lora, expert_groups=groups)
    axes = axes or {"fsdp": fsdp}
    mesh = zj.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())])
    with zj.build_train_step(model, TX, zj.ZeroConfig(**fields), mesh) as program:
        yield program, zj.import_hf(program, folder, key=jax.random.key(0))


def train(program, state, steps=3):
    """Return the state, losses and norms of some steps, and the bytes that a later step reads."""
    found = []
    for step in range(steps):
        state, metrics = program.step(state, batch_of(step))
        jax.block_until_ready(metrics)
        if program.swap is not None:  # reads that the next step waits for count there
            program.swap.engine.flush()
        names = ("loss", "grad_norm", "swap_read_bytes")
        found.append([float(metrics.get(name, 0)) for name in names])
        if program.swap is not None and step == 0:
            program.swap.engine.take_stats()
    losses, norms, read = np.array(found).T
    ahead = 0 if program.swap is None else program.swap.engine.take_stats().bytes_read
    return state, losses, norms, (sum(read[1:]) + ahead) / (steps - 1)


def params_of(program, state):
    """Return all parameters by name, with experts in one group."""
    pieces = {name: jax.device_get(tree) for name, tree in program.iter_params(state)}
    for name, tree in pieces.items():
        if name.startswith("blocks/"):
            experts = tree["mlp"]["experts"]
            for key, a in experts.items():
                experts[key] = a.reshape(-1, *a.shape[-2:])
    return pieces


@functools.cache
def in_one_group(folder, base, trains, fsdp):
    """Return losses, norms and parameters of a program on the device, with one group."""
    lora = None if trains else LORA
    with program_of(folder, 1, None, fsdp, lora, **BASES[base]) as (program, state):
        state, losses, norms, _ = train(program, state)
        return losses, norms, params_of(program, state)


def check(folder, groups, base, swap, fsdp=1, trains=False, account=None, **fields):
    """Compare a program with one whose experts are one group."""
    rtol = 1e-2 if base == "bf16" else 2e-5
    losses, norms, params = in_one_group(folder, base, trains, fsdp)
    fields |= BASES[base]
    lora = None if trains else LORA
    with program_of(folder, groups, swap, fsdp, lora, **fields) as (program, state):
        state, *found, read = train(program, state)
        np.testing.assert_allclose(found[0], losses, rtol=rtol)
        np.testing.assert_allclose(found[1], norms, rtol=10 * rtol)
        for name, tree in params_of(program, state).items():
            compare = functools.partial(np.testing.assert_allclose, rtol=0, atol=rtol)
            jax.tree.map(compare, tree, params[name])
        assert f"{groups} tiles of {EXPERTS}" in str(program.schedule)
        if account is not None:
            account(program, read)


def account_for_reads(program, read):
    """Compare the bytes that a step reads with the records and with the plan."""
    kinds = program.layout.disk.kinds
    per_layer = kinds["frozen"].num_bytes + 4 * kinds[f"frozen.tiles.{EXPERTS}"].num_bytes
    ends = sum(records.num_bytes for kind, records in kinds.items() if kind[7:].isdigit())
    # Each layer's record and each of its groups are read twice; embedding and head once.
    assert read == program.mesh.size * (2 * SIZES["num_hidden_layers"] * per_layer + ends)
    fixed = {name: getattr(program.config, name) for name in FIXED}
    plan = zj.plan(program.model, TX, program.mesh, batch_of(), MACHINE, fixed=fixed)
    assert plan.disk_bytes["read"] == read


@pytest.mark.exhaustive
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("base", list(BASES))
def test_frozen_groups_train_like_one_group(folder, tmp_path, monkeypatch, base, tier, fsdp):
    monkeypatch.setattr(traced, "is_there", lambda mesh: False)  # the plan's bytes matter alone
    # A frozen base on the device streams if other state is off it.
    fields = {"opt_state": "pinned_host"} if tier == "device" else {}
    account = account_for_reads if tier == "nvme" else None
    check(folder, 4, base, tmp_path, fsdp, account=account, frozen=tier, **fields)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("update", ["after_backward", "in_backward", "in_forward"])
@pytest.mark.parametrize("tier", TIERS)
def test_trained_groups_train_like_one_group(folder, tmp_path, tier, update, fsdp):
    fields = {"opt_state": "pinned_host", "update": update}
    if tier != "device":
        fields |= {"params": tier, "opt_state": tier}
    check(folder, 4, "float32", tmp_path, fsdp, trains=True, **fields)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"data": 2}], ids=str)
def test_groups_train_like_one_group_on_any_mesh(folder, axes):
    found = []
    for groups in (1, 4):
        fields = {"frozen": "pinned_host", "frozen_dtype": "int8", "axes": axes}
        with program_of(folder, groups, None, **fields) as (program, state):
            found.append(train(program, state)[1:3])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5)


@pytest.mark.exhaustive
def test_groups_keep_capacities_and_microbatches(folder, tmp_path):
    found = []
    for groups in (1, 4):
        model = model_of(folder, lora=LORA, expert_groups=groups, capacity_factor=1.0)
        mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])
        config = zj.ZeroConfig(frozen="pinned_host", num_microbatches=2)
        with zj.build_train_step(model, TX, config, mesh) as program:
            state = zj.import_hf(program, folder, key=jax.random.key(0))
            _, metrics = program.step(state, batch_of())
            found.append(
                [float(metrics[name]) for name in ("loss", "grad_norm", "dropped_fraction")]
            )
    assert found[0][2] > 0
    np.testing.assert_allclose(found[0], found[1], rtol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["gpt_oss", "glm4_moe-norms", "deepseek_v3", "llama4", "mixtral"])
def test_families_compute_and_export_the_same_in_groups(tmp_path, case):
    """Biases, shared experts, several stacks, weighed inputs and fused tensors."""
    need("torch", "transformers")
    like = tmp_path / "model"
    mixture_models.write(case, like)
    found = []
    for groups in (1, 4):
        fields = {"params": "pinned_host", "opt_state": "pinned_host"}
        with program_of(like, groups, None, lora=None, fsdp=2, **fields) as (program, state):
            with zj.Checkpointer(tmp_path / str(groups)) as ckpt:
                ckpt.save(program, state)
            found.append(train(program, state, steps=2)[1:3])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)
    zj.export_hf(tmp_path / "4", tmp_path / "out", like=like)
    for file in like.glob("*.safetensors"):
        ours = load_file(tmp_path / "out" / file.name)
        jax.tree.map(np.testing.assert_array_equal, ours, load_file(file))


# --- checkpoints and folders ----------------------------------------------------------------------


def codes_of(program, state):
    """Return the arrays of the experts as they are stored, by name, without the dim of groups."""
    frozen = state.params if state.frozen is None else state.frozen
    experts = frozen["blocks"]["mlp"]["experts"]
    arrays = {}
    for path, a in jax.tree_util.tree_flatten_with_path(experts)[0]:
        arrays[jax.tree_util.keystr(path)] = np.asarray(a).reshape(a.shape[0], -1)
    return arrays


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["float32", "int8", "nf4", "trained"])
def test_checkpoints_convert_groups_bit_for_bit(folder, tmp_path, base):
    lora = None if base == "trained" else LORA
    fields = BASES.get(base, {})
    saved = {}
    for groups in (1, 4):
        with program_of(folder, groups, None, lora=lora, **fields) as (program, state):
            saved[groups] = codes_of(program, state)
            with zj.Checkpointer(tmp_path / str(groups)) as ckpt:
                ckpt.save(program, state)
    # Imported in groups, or in one: the same bits.
    jax.tree.map(np.testing.assert_array_equal, saved[4], saved[1])
    for groups, other in ((1, 4), (4, 1), (2, 4)):
        with program_of(folder, groups, None, lora=lora, **fields) as (program, _):
            with zj.Checkpointer(tmp_path / str(other)) as ckpt:
                state = ckpt.restore(program)
            jax.tree.map(np.testing.assert_array_equal, codes_of(program, state), saved[1])
            state = zj.import_params(program, tmp_path / str(other), key=jax.random.key(0))
            jax.tree.map(np.testing.assert_array_equal, codes_of(program, state), saved[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["float32", "int8", "nf4", "trained"])
def test_exports_of_groups_are_the_folder(folder, tmp_path, base):
    lora = None if base == "trained" else LORA
    options = BASES.get(base, {})
    with (
        program_of(folder, 4, None, lora=lora, **options) as (program, state),
        zj.Checkpointer(tmp_path / "ckpt") as ckpt,
    ):
        ckpt.save(program, state)
    zj.export_hf(tmp_path / "ckpt", tmp_path / "out", like=folder, merge_lora=lora is not None)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


# --- forwards without gradients -------------------------------------------------------------------


def visited_groups(program, state, tokens, group_size, monkeypatch):
    """Return the number of groups of all layers that some tokens visit, by the model's own blocks."""
    chosen = []
    mix = mixture_block.mix_groups

    def record(*args):
        mixed = mix(*args)
        chosen.append(np.unique(np.asarray(mixed.chosen) // group_size))
        return mixed

    monkeypatch.setattr(mixture_block, "mix_groups", record)
    pieces = dict(program.iter_params(state))
    model = program.model
    batch = {"tokens": tokens}
    x = model.embed(pieces["embed"], batch, None)
    for n in range(model.num_layers):
        layer = {name: a[n] for name, a in model.per_layer.items()}
        x = model.block(pieces[f"blocks/{n}"], x, None, model.context(batch), layer)
    monkeypatch.undo()
    return sum(map(len, chosen))


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", ["float32", "nf4"])
def test_a_forward_reads_only_the_groups_that_its_tokens_visit(folder, tmp_path, monkeypatch, base):
    groups = SIZES["num_experts"]
    with program_of(folder, groups, tmp_path, frozen="nvme", **BASES[base]) as (program, state):
        tile_bytes = program.layout.disk.kinds[f"frozen.tiles.{EXPERTS}"].num_bytes
        tokens = np.array([[5, 17]], np.int32)
        read = {}
        for name, call in {"eval": program.eval, "apply": program.apply}.items():
            for _ in range(2):  # the second call finds the records that the first one read ahead
                call(state, {"tokens": tokens, "targets": tokens})
            read[name] = program.disk_metrics["swap_read_bytes"]
        skipped = (read["eval"] - read["apply"]) / tile_bytes
        num_groups = SIZES["num_hidden_layers"] * groups
        visited = visited_groups(program, state, tokens, 1, monkeypatch)
        assert 0 < visited < num_groups
        assert skipped == num_groups - visited
        # Later tokens are computed one by one, with the cache, and visit k groups of a layer each.
        prompts = [[5, 17, 40], [3]]
        found = zj.generate(program, state, prompts, 3)
        read["last"] = program.disk_metrics["swap_read_bytes"]
        most = len(prompts) * SIZES["num_experts_per_tok"] * SIZES["num_hidden_layers"]
        assert read["eval"] - read["last"] >= (num_groups - most) * tile_bytes
        again = zj.generate(program, state, prompts, 3, use_cache=False)
    with program_of(folder, 1, None, **BASES[base]) as (program, state):
        expected = zj.generate(program, state, prompts, 3)
    for rows in (found, again):
        assert [row.tolist() for row in rows] == [row.tolist() for row in expected]


# --- refusals -------------------------------------------------------------------------------------


def test_groups_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"expert_groups=3 does not divide the 8 experts .* = 2"):
        model_of(folder, expert_groups=3)
    with pytest.raises(ValueError, match="expert_groups"):
        model_of(folder, expert_groups=0)
    with pytest.raises(ValueError, match=r"seq_tiles=2 cannot be combined with expert_groups=4"):
        model_of(folder, expert_groups=4, seq_tiles=2)
    mesh = zj.make_mesh(fsdp=1, expert=2, devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match=r"experts in groups .* mesh with expert=2: use"):
        zj.build_train_step(model_of(folder, expert_groups=4), TX, zj.ZeroConfig(stage=3), mesh)

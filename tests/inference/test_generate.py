"""Generated tokens, with and without a cache, on the device and from disk.

They equal a plain loop's tokens; sampling is tested too.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import packed_decoder as decoder
import pytest

import zerojax as zj
from zerojax.inference.arguments import checked_ends, checked_key
from zerojax.inference.sampling import next_tokens
from zerojax.models import init_params

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [8, 8]]
COUNT = 8
ON_DISK = {"params": "nvme", "opt_state": "nvme"}


def build(model=None, fields=None, devices=2, **axes):
    mesh = zj.make_mesh(**(axes or {"fsdp": devices}), devices=jax.devices()[:devices])
    return zj.build_train_step(
        model or decoder.generator(),
        optax.sgd(1.0),
        zj.ZeroConfig(**{"stage": 3, **(fields or {})}),
        mesh,
    )


@functools.cache
def plain():
    """Return each prompt's greedy tokens: one prompt at a time, re-reading all tokens for each."""
    model = decoder.generator()
    params = init_params(model, jax.random.key(0))

    @jax.jit
    def logits(tokens):
        batch = {"tokens": tokens, "positions": jnp.arange(tokens.shape[1])[None]}
        x = decoder.embed(params["embed"], batch, None)
        for layer in range(decoder.LAYERS):
            x = model.block(
                jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"]),
                x,
                None,
                batch["positions"],
                None,
            )
        return decoder.predict(params["head"], None, x, batch)[0, -1]

    found = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(COUNT):
            row.append(int(jnp.argmax(logits(jnp.asarray([row])))))
        found.append(row[len(prompt) :])
    return found


CASES = {
    "one": {"devices": 1},
    "fsdp": {},
    "uneven": {"devices": 8},  # 4 prompts on 8 devices
    "stage1": {"fields": {"stage": 1}},
    "stage0": {"fields": {"stage": 0}, "data": 2},
    "opt_on_disk": {"fields": {"opt_state": "nvme"}},
    "host": {"fields": {"params": "pinned_host", "opt_state": "pinned_host"}},
    "nvme": {"fields": ON_DISK},
}


@pytest.mark.by_default("fsdp", "nvme")
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_a_plain_loop(name, tmp_path):
    case = dict(CASES[name])
    fields = case.pop("fields", {})
    with build(
        fields=fields | ({"swap_dir": tmp_path} if "nvme" in fields.values() else {}), **case
    ) as program:
        state = program.init(jax.random.key(0))
        found = zj.generate(program, state, PROMPTS, COUNT)
        assert [row.tolist() for row in found] == plain()
        if name != "nvme":  # in the time of the default tests
            again = zj.generate(program, state, PROMPTS, COUNT, use_cache=False)
            assert [row.tolist() for row in again] == plain()


def test_a_row_ends_with_its_token_and_the_others_go_on():
    program = build()
    state = program.init(jax.random.key(0))
    eos = plain()[2][1]
    # numpy's numbers are accepted like Python's.
    rows = [np.asarray(row, np.uint16) for row in PROMPTS]
    found = zj.generate(
        program, state, rows, np.int64(COUNT), np.float32(0), np.float64(1), eos=np.int32(eos)
    )
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in plain()]
    assert [row.tolist() for row in found] == expected
    assert len({len(row) for row in expected}) > 1
    assert [
        row.tolist() for row in zj.generate(program, state, PROMPTS[2:3], COUNT, eos={eos, 1})
    ] == [expected[2]]


def test_draws_follow_the_probabilities_and_the_key():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.15, 0.1]]))

    def drawn(temperature, top_p):
        draw = jax.vmap(lambda key: next_tokens(logits, key, temperature, top_p)[0])
        return np.bincount(draw(jax.random.split(jax.random.key(0), 4000)), minlength=4)

    np.testing.assert_allclose(drawn(1.0, 1.0) / 4000, [0.5, 0.25, 0.15, 0.1], atol=0.03)
    np.testing.assert_allclose(
        drawn(0.5, 1.0) / 4000, np.square([0.5, 0.25, 0.15, 0.1]) / 0.345, atol=0.03
    )
    np.testing.assert_allclose(drawn(1.0, 0.6) / 4000, [2 / 3, 1 / 3, 0, 0], atol=0.03)
    assert drawn(1.0, 0.5).tolist() == [4000, 0, 0, 0]
    assert next_tokens(logits[:, ::-1], None, 0.0, 1.0).tolist() == [3]
    assert next_tokens(logits[:, ::-1], jax.random.key(0), 1e-38, 1.0).tolist() == [
        3
    ]  # near 0 it is the most likely token too
    program = build()
    state = program.init(jax.random.key(0))
    one, other = (
        zj.generate(program, state, PROMPTS, COUNT, 1.0, 0.9, key=jax.random.key(seed))
        for seed in (1, 2)
    )
    again = zj.generate(
        program, state, PROMPTS, COUNT, 1.0, 0.9, key=jax.random.key(1), use_cache=False
    )
    assert [row.tolist() for row in one] == [row.tolist() for row in again]
    assert [row.tolist() for row in one] != [row.tolist() for row in other]


def test_a_second_call_compiles_nothing():
    traced = []

    def block(*args):
        traced.append(1)
        return decoder.cached_block(*args)

    program = build(
        dataclasses.replace(decoder.generator(), cache=zj.Cache(decoder.init_cache, block))
    )
    state = program.init(jax.random.key(0))
    zj.generate(program, state, PROMPTS, COUNT)
    count = len(traced)
    assert count > 0
    zj.generate(program, state, [row[::-1] for row in PROMPTS], COUNT)
    assert len(traced) == count


WRONG = {
    "none": ({"prompts": []}, "no prompts"),
    "empty": ({"prompts": [[1], []]}, r"prompt 1 is \[\]"),
    "text": ({"prompts": ["a"]}, "prompt 0 is 'a'"),
    "count": ({"max_new_tokens": 0}, "max_new_tokens=0"),
    "key": ({"temperature": 1.0}, "temperature=1.0 draws at random: pass key="),
    "top_p": ({"top_p": 0.0}, "top_p=0.0"),
    "nan": ({"temperature": float("nan")}, "temperature=nan"),
    "negative": ({"prompts": [[1], [2, -3]]}, "prompt 1 has token -3"),
    "half": ({"max_new_tokens": 2.5}, r"max_new_tokens=2\.5: an integer of at least 1"),
    "flag": ({"max_new_tokens": True}, "max_new_tokens=True"),
    "count-text": ({"max_new_tokens": "8"}, "max_new_tokens='8'"),
    "endless": ({"max_new_tokens": 10**12}, "max_new_tokens=1000000000000: .* at most 2147483647"),
    "no-list": ({"prompts": 3}, "prompts=3: a list of lists of tokens is needed"),
    "one-text": ({"prompts": "hello"}, "prompts='hello'"),
    "no-prompts": ({"prompts": None}, "prompts=None"),
    "one-row": ({"prompts": [3, 1, 4]}, "prompt 0 is 3: a list of at least one token"),
    "ragged": ({"prompts": [[[1], [2, 3]]]}, "prompt 0 is"),
    "tokens-flags": ({"prompts": [[True, False]]}, r"prompt 0 is \[True, False\]"),
    "large": (
        {"prompts": [[2**40]]},
        f"prompt 0 has token {2**40}: tokens are integers from 0 to 2147483647",
    ),
    "unsigned": (
        {"prompts": [np.asarray([2**32 - 1], np.uint32)]},
        f"prompt 0 has token {2**32 - 1}",
    ),
    "temperature-text": (
        {"temperature": "hot"},
        "temperature='hot': a finite number of at least 0",
    ),
    "temperature-none": ({"temperature": None}, "temperature=None"),
    "temperature-flag": ({"temperature": True}, "temperature=True"),
    "top_p-text": ({"top_p": "all"}, "top_p='all': a number above 0 and at most 1"),
    "top_p-nan": ({"top_p": float("nan")}, "top_p=nan"),
    "eos-text": ({"eos": "</s>"}, "eos='</s>': a token, a collection of tokens, or None"),
    "eos-float": ({"eos": 2.0}, r"eos=2\.0"),
    "eos-floats": ({"eos": [2, 2.5]}, r"eos=\[2, 2\.5\]"),
    "eos-flag": ({"eos": True}, "eos=True"),
    "eos-negative": ({"eos": -1}, "eos=-1: tokens are integers from 0 to 2147483647"),
    "eos-none-inside": ({"eos": {None}}, r"eos=\{None\}"),
    "key-number": (
        {"temperature": 1.0, "key": 3},
        r"key=3: a random key, such as jax\.random\.key\(0\)",
    ),
    "key-unused": ({"key": "seed"}, "key='seed'"),
    "use_cache": ({"use_cache": "no"}, "use_cache='no': None, True or False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    given, message = WRONG[name]
    # Nothing of the program is examined before.
    with pytest.raises(ValueError, match=message):
        zj.generate(
            cast(Any, None), cast(Any, None), **{"prompts": PROMPTS, "max_new_tokens": 2, **given}
        )


def test_several_keys_are_refused_and_old_ones_taken():
    for wrong in (jax.random.split(jax.random.key(0)), jnp.zeros(2), jnp.zeros((3, 2), jnp.uint32)):
        with pytest.raises(ValueError, match="a random key, such as"):
            zj.generate(cast(Any, None), cast(Any, None), PROMPTS, 2, 1.0, key=wrong)
    assert checked_key(jax.random.PRNGKey(0), 1.0) is not None
    assert checked_key(jax.random.key(0), np.float32(1.0)) is not None
    assert checked_key(jax.random.key(0), 0) is None


def test_ends_of_every_form_are_taken():
    assert checked_ends(None).tolist() == []
    for ends in (
        7,
        np.int64(7),
        np.asarray(7),
        jnp.asarray(7),
        [7],
        {7},
        np.asarray([7], np.uint8),
        jnp.asarray([7]),
    ):
        assert checked_ends(ends).tolist() == [7]
    assert checked_ends((9, np.int16(3))).tolist() == [3, 9]


@pytest.mark.parametrize("use_cache", [True, False])
def test_tokens_outside_of_the_vocabulary_are_refused(use_cache):
    with build(decoder.generator()) as program:
        state = program.init(jax.random.key(0))
        with pytest.raises(ValueError, match="has token 1000000, but the model has"):
            zj.generate(program, state, [[1, 2], [3, 1_000_000]], 2, use_cache=use_cache)


@pytest.mark.parametrize("use_cache", [True, False])
def test_ends_outside_of_the_vocabulary_are_refused(use_cache):
    with build(decoder.generator()) as program:
        state = program.init(jax.random.key(0))
        with pytest.raises(
            ValueError, match=r"eos has token 4000, but the model has \d+ tokens, counted from 0"
        ):
            zj.generate(program, state, PROMPTS, 2, eos=[1, 4000], use_cache=use_cache)


def in_two_stacks(one: zj.LayeredModel, cache: zj.Cache) -> zj.LayeredModel:
    """Return a model whose first layer is a stack of its own, with the same initial weights."""
    counts = {"first": 1, "others": one.num_layers - 1}
    layers = {"first": slice(0, 1), "others": slice(1, None)}
    return dataclasses.replace(
        one,
        init_block=None,
        block=None,
        stacks=[zj.Stack(name, n, one.init_block, one.block) for name, n in counts.items()],
        specs=None,
        per_layer={n: jax.tree.map(lambda a, s=s: a[s], one.per_layer) for n, s in layers.items()},
        cache=cache,
    )


@pytest.mark.exhaustive  # by default one stack has a cache
def test_a_cache_of_two_stacks_gives_the_tokens_of_one():
    one = decoder.generator()
    assert one.cache is not None
    block = one.cache.block
    two = in_two_stacks(one, zj.Cache(one.cache.init, {"first": block, "others": block}))
    found = []
    for model in (one, two):
        program = build(model)
        tokens = zj.generate(
            program, program.init(jax.random.key(0)), PROMPTS, COUNT, use_cache=True
        )
        found.append([row.tolist() for row in tokens])
    assert found[0] == found[1]


def test_models_without_logits_or_cache_are_told():
    one = decoder.generator()
    with pytest.raises(
        ValueError, match=r"dict of functions by the names of the stacks, \['first'"
    ):
        in_two_stacks(one, one.cache)
    with pytest.raises(ValueError, match="pass predict= to the model"):
        zj.generate(build(decoder.model()), None, PROMPTS, 2)
    with pytest.raises(ValueError, match="the model has no cache="):
        zj.generate(
            build(dataclasses.replace(decoder.generator(), cache=None)),
            None,
            PROMPTS,
            2,
            use_cache=True,
        )
    with pytest.raises(ValueError, match="a cache needs a model without enter and init_state"):
        dataclasses.replace(decoder.generator(), init_state={"head": lambda key: 0})
    with pytest.raises(ValueError, match="needs a LayeredModel with cache= and predict="):
        build(decoder.model()).apply_cached(None, {}, None, 8)

"""The order of a program's callbacks, found from its traced program, is the order of calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.experimental.buffer_callback import buffer_callback

import zerojax as zj
import zerojax.program.compile as compile_
from host_offload.calls import CallbackSite, Calls
from host_offload.disk import SwapError
from zerojax.ordering import wait_for
from zerojax.program.call_order import order_calls

DISK = "nvme"
ALL = {"params": DISK, "grads": DISK, "opt_state": DISK, "activations": DISK}
NONE = jnp.zeros(1, jnp.int32)


class Program:
    """A program of sites, the arguments that they are given, and the values that they see."""

    def __init__(self, function, *args):
        self.calls, self.seen = Calls(jax.devices()[:1]), {}
        self.sites = []
        self.jitted = jax.jit(lambda *args: function(self, *args))
        closed = self.jitted.trace(*args).jaxpr
        assert order_calls(closed)
        jax.block_until_ready(self.jitted(*args))

    def site(self, name):
        """Return a function that calls back for a layer."""
        site = CallbackSite(self.calls, name)
        self.sites.append(site)

        def callback(context, out, where, *, site):
            del context
            self.seen.setdefault(site.name, []).append(int(np.asarray(where)[1]))
            np.asarray(out)[...] = 1

        def call(layer, token=NONE):
            run = buffer_callback(
                functools.partial(callback, site=site),
                jax.ShapeDtypeStruct((1,), jnp.int32),
                has_side_effect=True,
            )
            return run(Calls.request(NONE, layer, token))

        return call

    @property
    def orders(self):
        """Return the calls of each site in the program."""
        return {
            site.name: site.order
            for site in self.sites
            if site.name in self.seen and site.order is not None
        }


def test_layers_of_loops_are_those_of_the_constants_that_they_read():
    array = jnp.array([3, 4, 1, 0], jnp.int32)

    def function(program, x):
        fetch = program.site("fetch")

        def body(t, carry):
            return carry + fetch(array[t], carry) * x

        return jax.lax.fori_loop(0, 4, body, jax.lax.fori_loop(1, array[1], body, NONE))

    program = Program(function, jnp.int32(1))
    assert program.seen["fetch"] == [4, 1, 0, 3, 4, 1, 0]
    assert program.orders == {"fetch": program.seen["fetch"]}


def test_tiles_are_counted_by_two_loops():
    def function(program):
        fetch = program.site("fetch")

        def layer(carry, layer):
            def tile(k, carry):
                return fetch(layer * 3 + (2 - k), carry)

            return jax.lax.fori_loop(0, 3, tile, carry), None

        return jax.lax.scan(layer, NONE, jnp.arange(2), reverse=True)[0]

    program = Program(function)
    assert program.orders == program.seen == {"fetch": [5, 4, 3, 2, 1, 0]}


def test_what_waits_for_values_is_still_known():
    mesh = zj.make_mesh(fsdp=1, devices=jax.devices()[:1])

    def function(program, x):
        fetch = program.site("fetch")
        begin, _ = wait_for(jnp.int32(0), x * 2.0, mesh)
        return jax.lax.fori_loop(
            0, 2, lambda t, c: fetch(jax.lax.rem(5 - 3 * t + begin, jnp.int32(4)), c), NONE
        )

    program = Program(function, jnp.ones(3))
    assert program.orders == program.seen == {"fetch": [1, 2]}


def test_branches_that_are_known_are_taken():
    def function(program):
        first, second = program.site("first"), program.site("second")

        def tick(t, carry):
            return jax.lax.cond(t > 0, lambda: first(t, carry), lambda: second(t + 5, carry))

        return jax.lax.fori_loop(0, 2, tick, NONE)

    assert Program(function).orders == {"second": [5], "first": [1]}


@pytest.mark.parametrize("kind", ["cond", "while", "index"])
def test_calls_that_depend_on_data_have_no_order(kind, caplog):
    def function(program, x):
        fetch = program.site("fetch")
        if kind == "cond":
            return jax.lax.cond(x > 0, lambda: fetch(jnp.int32(1)), lambda: NONE)
        if kind == "while":
            return jax.lax.while_loop(
                lambda c: c[0] < x, lambda c: c + fetch(jnp.int32(1), c), NONE
            )
        return fetch(x)

    program = Program(function, jnp.int32(1))
    assert program.seen == {"fetch": [1]}
    assert program.orders == {}
    is_warned = "order depends on data wait for the device at each call: fetch" in caplog.text
    assert is_warned == (kind != "cond")  # a forward that skips experts branches on purpose


def program_on_disk(tmp_path, **fields):
    config = zj.ZeroConfig(stage=3, swap_dir=str(tmp_path), **{**ALL, **fields})
    return zj.build_train_step(
        toys.small(), optax.adamw(1e-2), config, zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    )


@pytest.fixture
def sites(monkeypatch):
    """Return all sites of the programs that are run."""
    found = []

    def spy(closed):
        found.extend(order_calls(closed))
        return found

    monkeypatch.setattr(compile_, "order_calls", spy)
    return found


def test_each_site_is_called_as_its_schedule_says_and_another_order_is_an_error(tmp_path, sites):
    (batch,) = toys.batches(1)
    with program_on_disk(tmp_path, update="in_backward") as program:
        state, _ = program.step(program.init(jax.random.key(0)), batch)
        assert sites
        for site in sites:
            assert [count for _, count in site._counts.values()] == [len(site.order)] * 2
        site = next(
            site for site in sites if len(set(site.order)) > 1 and site.name == "fetch params"
        )
        site.order = site.order[::-1]
        with pytest.raises(
            SwapError,
            match=r"fetch params: call 1 of a step was for layer \d and not \d.*disk is lost",
        ):
            program.step(state, batch)

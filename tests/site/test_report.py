"""The page of a run, in a browser, on a laptop's and a phone's width."""

import jax
import numpy as np
import optax
import pytest
import toys
from visits import WIDTHS

import zerojax as zj

STEPS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Report a small run: a validation now and then, one skipped step, a name that HTML escapes."""
    folder = tmp_path_factory.mktemp("run")
    mesh = zj.make_mesh(fsdp=2, devices=jax.devices()[:2])
    config = zj.ZeroConfig(stage=1)
    program = zj.build_train_step(toys.layered(), optax.adam(1e-3), config, mesh)
    (batch,) = toys.batches(1)
    options = {"memory": program.memory(batch), "config": {"lr": 1e-3, "zero": config}}
    run = zj.Run(folder, program=program, steps=STEPS, report_to=(), name="a <run>", **options)
    with run:
        for step in range(1, STEPS + 1):
            metrics = {"loss": 8 / step, "grad_norm": 1.0, "skipped_steps": step // 20}
            run.step(step, {name: np.float32(value) for name, value in metrics.items()})
            if step % 10 == 0:
                run.log(step, {"validation/loss": 9 / step})
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_report_loads_and_fits(visitor_of, folder, width, scheme):
    visitor = visitor_of(folder, width)
    visitor.page.emulate_media(color_scheme=scheme)
    name = f"report.html?{scheme}"  # a visit is made once for each name
    assert visitor.visit(name).faults == []
    assert visitor.broken_links(name) == []
    assert "a <run>" in visitor.page.inner_text("body")

"""Handwritten schedules, whose times can be computed by hand.

An array is bf16[1000,1000], 2e6 bytes. A product of two is 2e9 FLOPs. The rates make each of these
take 2 s: a product, a copy of an array over the link, and a kernel that reads one over it. Anything
without a rate takes almost no time.
"""

import dataclasses

import pytest

from zerojax import hlo

A = "bf16[1000,1000]{1,0}"
HOST_A = "bf16[1000,1000]{1,0:S(5)}"
STACK = "bf16[4,1000,1000]{2,1,0:S(5)}"
PART = "bf16[1,1000,1000]{2,1,0}"
RATES = hlo.Rates(
    products=1e9, products_float32=1e9, attention=1e9, attention_backward=1e9, memory=1e15, link=1e6, kernel_link=1e6,
    launch_seconds=0, issue_seconds=0, sync_seconds=0, callback_seconds=0, leaf_seconds=0, disk_read=1e6, disk_write=1e6,
    host_kernel=14e6, host_copy=6e6,
)  # fmt: skip
DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
UP = f"({A}, {HOST_A}, u32[]) copy-start(%h)"
DOWN = f"({HOST_A}, {A}, u32[]) copy-start(%x)"
SLICE = f"(({STACK}, s32[], s32[], s32[]), {PART}, u32[]) fusion-start(%s, %i, %i, %i), kind=kLoop, calls=%read"
CALLBACK = 'custom_call_target="xla_buffer_python_gpu_callback", custom_call_has_side_effect=true'
LINEAR = ', backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"2000000"}}'
TUPLE = f"(s32[], {A}, {HOST_A}, {STACK})"


def module(
    entry: str,
    body: str = "",
    condition: str = "  ROOT %less = pred[] compare(%i, %i), direction=LT",
    read: str = "",
):
    """Return a program with x on the device, h and a stack s on the host, and an integer i.

    These are the arguments of its computations.
    """
    inside = "\n".join(
        f"  %{name} = {shape} get-tuple-element(%p), index={n}"
        for n, (name, shape) in enumerate(zip("ixhs", ("s32[]", A, HOST_A, STACK), strict=True))
    )
    return f"""HloModule jit_step, is_scheduled=true

%read (stack: {STACK}, a: s32[], b: s32[], c: s32[]) -> {PART} {{
  %stack = {STACK} parameter(0)
  %a = s32[] parameter(1)
  %b = s32[] parameter(2)
  %c = s32[] parameter(3)
  ROOT %slice = {PART} dynamic-slice(%stack, %a, %b, %c), dynamic_slice_sizes={{1,1000,1000}}{read}
}}

%body (p: {TUPLE}) -> {TUPLE} {{
  %p = {TUPLE} parameter(0)
{inside}
{body}
  ROOT %t = {TUPLE} tuple(%i, %x, %h, %s)
}}

%condition (p: {TUPLE}) -> pred[] {{
  %p = {TUPLE} parameter(0)
{inside}
{condition}
}}

ENTRY %main (i: s32[], x: {A}, h: {HOST_A}, s: {STACK}) -> {A} {{
  %i = s32[] parameter(0), metadata={{op_name="arrays.index"}}
  %x = {A} parameter(1), metadata={{op_name="state.params[\\'w\\']"}}
  %h = {HOST_A} parameter(2), metadata={{op_name="state.master[\\'head\\']"}}
  %s = {STACK} parameter(3), metadata={{op_name="state.master[\\'blocks\\']"}}
{entry}
  ROOT %out = {A} bitcast(%x)
}}
"""


def product(name: str) -> str:
    return f"  %{name} = {A} {DOT}"


def start(name: str, work: str = UP) -> str:
    return f"  %{name} = {work}"


def done(name: str, op: str = "copy-done") -> str:
    return f"  %{name}.done = {A} {op}(%{name})"


def loop(name: str, trips: int | None) -> str:
    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"""  %{name}.in = {TUPLE} tuple(%i, %x, %h, %s)
  %{name} = {TUPLE} while(%{name}.in), condition=%condition, body=%body{known}"""


def lines(*texts: str) -> str:
    return "\n".join(texts)


def seconds(found: hlo.Simulation):
    """Return the seconds of the step, of compute, and of the main stream's waits for transfers.

    The result is a `pytest.approx`.
    """
    return pytest.approx(
        (found.seconds, found.compute_seconds, found.transfer_wait_seconds), abs=1e-6
    )


def test_a_copy_beside_a_product_costs_nothing():
    text = module(lines(start("c"), product("d1"), done("c"), product("d2")))
    found = hlo.simulate(text, rates=RATES)
    # The copy 0..2 during d1 0..2, then d2 2..4.
    assert seconds(found) == (4, 4, 0)
    assert found.idle == pytest.approx(0, abs=1e-6)
    assert found.traffic.by_copies == {"to_device": 2_000_000, "to_host": 0}
    assert found.busy["link up"] == pytest.approx(2)
    assert found.flops == 4e9
    assert found.floor_seconds == pytest.approx(4, abs=1e-6)


def test_a_product_waits_for_a_copy_that_takes_longer():
    text = module(lines(start("c"), product("d1"), done("c"), product("d2")))
    found = hlo.simulate(text, rates=dataclasses.replace(RATES, link=0.5e6))
    # The copy 0..4, d1 0..2, the main stream waits 2..4, d2 4..6.
    assert seconds(found) == (6, 4, 2)
    assert found.idle == pytest.approx(1 / 3, abs=1e-6)


def test_a_copy_is_begun_where_the_main_stream_is():
    text = module(lines(product("d1"), start("c"), product("d2"), done("c")))
    # d1 0..2, then the copy 2..6 and d2 2..4.
    assert seconds(hlo.simulate(text, rates=dataclasses.replace(RATES, link=0.5e6))) == (6, 4, 2)
    # A transfer that XLA's runtime does not start on a separate stream, according to its thunks: d1
    # 0..2, the copy 2..4, d2 4..6.
    thunks = hlo.Thunks({"c": "kCopy"}, {})
    assert seconds(hlo.simulate(text, rates=RATES, thunks=thunks)) == (6, 4, 0)
    waited = module(
        lines(
            product("d1"),
            start("c", UP + ', backend_config={"is_sync":true}'),
            product("d2"),
            done("c"),
        )
    )
    # d1 0..2, the copy 2..4, d2 4..6.
    assert seconds(hlo.simulate(waited, rates=RATES)) == (6, 4, 0)


def test_two_loops_run_as_often_as_their_trips():
    body = lines(start("c"), product("d1"), done("c"), product("d2"))
    found = hlo.simulate(
        module(lines(loop("w1", 3), product("d0"), loop("w2", 2)), body), rates=RATES
    )
    # An iteration takes 4 s: 3 iterations, a product of 2 s, 2 iterations.
    assert seconds(found) == (22, 22, 0)
    assert [(one.name, one.trips, one.is_known) for one in found.loops] == [
        ("w1", 3, True),
        ("w2", 2, True),
    ]
    assert [one.seconds for one in found.loops] == pytest.approx([12, 8], abs=1e-6)
    assert found.traffic.by_copies["to_device"] == 5 * 2_000_000
    assert found.num_host_waits == 0


def test_the_host_waits_at_a_loop_of_unknown_trip_count():
    rates = dataclasses.replace(RATES, issue_seconds=1, sync_seconds=0.5)
    known = hlo.simulate(module(loop("w", 2), product("d")), rates=rates)
    # Enqueued at 1 and 2; the products run 1..3 and 3..5.
    assert seconds(known) == (5, 4, 0)
    assert (known.num_host_waits, known.host_wait_seconds) == (0, 0)
    found = hlo.simulate(module(loop("w", None), product("d")), rates=rates, unknown_trips=2)
    # Condition enqueued 0..1, waited for until 1.5; product enqueued until 2.5, runs 2.5..4.5;
    # condition enqueued until 3.5, runs at 4.5, waited for until 5; product enqueued until 6, runs
    # 6..8; condition at 8, waited for until 8.5.
    assert seconds(found) == (8.5, 4, 0)
    # 0.5, then 3.5 .. 5, then 7 .. 8.5.
    assert (found.num_host_waits, found.host_wait_seconds) == (3, pytest.approx(3.5, abs=1e-6))
    assert not found.loops[0].is_known
    assert found.loops[0].seconds == pytest.approx(8, abs=1e-6)


@pytest.mark.parametrize(("kernels", "expected"), [("exclusive", (4, 2, 0)), ("beside", (2, 2, 0))])
def test_kernels_and_products_share_the_cores_or_not(kernels, expected):
    text = module(lines(start("c", SLICE), product("d"), done("c", "fusion-done")))
    found = hlo.simulate(text, rates=RATES, kernels=kernels)
    # Without a descriptor the slice is a kernel: it takes the cores 0..2 and the product 2..4, or
    # both run 0..2.
    assert seconds(found) == expected
    assert found.idle == pytest.approx(1 - expected[1] / expected[0])
    assert found.traffic.by_kernels == {"to_device": 2_000_000, "to_host": 0}
    linear = text.replace(
        "dynamic_slice_sizes={1,1000,1000}", "dynamic_slice_sizes={1,1000,1000}" + LINEAR
    )
    # With a descriptor it is a copy, and leaves the cores free.
    assert seconds(hlo.simulate(linear, rates=RATES, kernels=kernels)) == (2, 2, 0)


@pytest.mark.parametrize(("streams", "expected"), [("turns", 10), ("each", 8), ("direction", 8)])
def test_four_streams_in_turn_let_an_upload_wait_for_a_download(streams, expected):
    downs = [start(f"down{n}", DOWN) for n in range(4)]
    rest = [
        done("up"),
        product("d1"),
        product("d2"),
        product("d3"),
        *[done(f"down{n}") for n in range(4)],
    ]
    found = hlo.simulate(module(lines(*downs, start("up"), *rest)), rates=RATES, streams=streams)
    # Downloads one after the other, 0..8. In turn, the upload follows the first: 2..4, and three
    # products end at 10. With its own stream, or one per direction: 0..2, and they end at 8.
    assert found.seconds == pytest.approx(expected, abs=1e-6)
    assert found.streams == hlo.STREAMS[streams]


def test_streams_are_those_of_the_installed_xla_if_nothing_says_otherwise(monkeypatch):
    downs = [start(f"down{n}", DOWN) for n in range(4)]
    text = module(
        lines(*downs, start("up"), done("up"), product("d1"), product("d2"), product("d3"))
    )
    for version, expected in (("0.10.2", 10), ("0.11.2", 10), ("0.12.0.1", 8)):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        found = hlo.simulate(text, rates=RATES)
        assert found.seconds == pytest.approx(expected, abs=1e-6)
        assert f"assumed: jaxlib {version} is installed" in found.streams
    kinds = dict.fromkeys(("up", *(f"down{n}" for n in range(4))), "kAsyncStart/kCopy")
    # The thunks put the upload behind the last download, which has been ready since 0 and so runs
    # second: 2..4. The upload 4..6, the products until 12.
    streams = {"up": "one", "down0": "two", "down1": "two", "down2": "two", "down3": "one"}
    found = hlo.simulate(text, rates=RATES, thunks=hlo.Thunks(kinds, streams))
    assert found.seconds == pytest.approx(12, abs=1e-6)
    assert found.streams == "as the program's thunks name them"


def test_the_host_waits_at_a_conditional_and_its_last_branch_runs():
    branch = f"  %b = {A} conditional(%i, %x, %x), branch_computations={{%less, %more}}"
    text = module(lines(product("d1"), branch, product("d2")))
    for name, rows in (("less", ""), ("more", lines(product("m1"), product("m2")))):
        text += f"\n%{name} (x: {A}) -> {A} {{\n  %x = {A} parameter(0)\n{rows}\n  ROOT %r = {A} bitcast(%x)\n}}\n"
    found = hlo.simulate(text, rates=dataclasses.replace(RATES, sync_seconds=0.5))
    # d1 0..2, waited for until 2.5, two products of the last branch and d2 2.5..8.5.
    assert seconds(found) == (8.5, 8, 0)
    assert (found.num_host_waits, found.host_wait_seconds) == (1, pytest.approx(2.5, abs=1e-6))


FUSED = """
%fused (s: f32[6,500,500], v: f32[1,500,500], i: s32[]) -> f32[6,500,500] {
  %s = f32[6,500,500]{2,1,0} parameter(0)
  %v = f32[1,500,500]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %old = f32[1,500,500]{2,1,0} dynamic-slice(%s, %i, %i, %i), dynamic_slice_sizes={1,500,500}
  %new = f32[1,500,500]{2,1,0} add(%old, %v)
  ROOT %update = f32[6,500,500]{2,1,0} dynamic-update-slice(%s, %new, %i, %i, %i)
}
"""
ATTENTION = """  %f = (bf16[2,4,100,8]{3,1,2,0}, f32[2,4,100]{2,1,0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBACKWARD", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","100","100"]},"mask_type":"MASK"}}"""


def test_a_fusion_takes_the_time_of_the_bytes_that_it_reads_and_writes():
    stack = "f32[6,500,500]{2,1,0}"
    given = f"  %stack = {stack} bitcast(%s)\n"
    text = module(f"{given}  %k = {stack} fusion(%stack, %x, %i), kind=kLoop, calls=%fused") + FUSED
    found = hlo.simulate(text, rates=dataclasses.replace(RATES, memory=1e6))
    # A part is 1e6 bytes: the stack's part and the added array are read, and the stack's part is
    # written. Plus an index.
    assert found.seconds == pytest.approx(3, abs=1e-5)
    assert list(found.work) == ["fusions"]


@pytest.mark.parametrize(
    ("direction", "mask", "flops"),
    [
        ("", "NO_MASK", 1),
        ("", "CAUSAL", 0.5),
        ("Backward", "NO_MASK", 2.5),
        ("Backward", "CAUSAL", 1.25),
    ],
)
def test_attention_counts_its_scores(direction, mask, flops):
    rows = lines(
        "  %q = bf16[2,100,4,8]{3,2,1,0} bitcast(%x)",
        ATTENTION.replace("BACKWARD", direction).replace('"MASK"', f'"{mask}"'),
    )
    rates = dataclasses.replace(RATES, attention=1e5, attention_backward=2e5)
    found = hlo.simulate(module(rows), rates=rates)
    # Forward 4 x 2 x 4 x 100 x 100 x 8 FLOPs; half under a causal mask; backward 2.5 times that.
    assert found.flops == flops * 2_560_000
    assert found.seconds == pytest.approx(found.flops / (2e5 if direction else 1e5))


CALLS = lines(product("d1"), f"  %cb = {A} custom-call(%i, %x), {CALLBACK}", product("d2"))
CALL_RATES = dataclasses.replace(RATES, sync_seconds=0.25, callback_seconds=0.5, leaf_seconds=0.125)


def test_a_callback_drains_the_stream():
    found = hlo.simulate(module(CALLS), rates=CALL_RATES, callbacks="plain")
    # d1 0..2; the host waits until 2.25; Python 0.5 and 0.125 for each of two arrays, until 3; d2
    # 3..5.
    assert seconds(found) == (5, 4, 0)
    assert (found.num_callbacks, found.num_host_waits) == (1, 1)
    assert found.host_wait_seconds == pytest.approx(2.25, abs=1e-6)
    assert found.callback_bytes == {"to_device": 0, "to_host": 0}
    assert found.traffic.moves == ()


def test_a_delayed_update_has_all_of_the_step():
    stash, install = (
        f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}",
        f"  %new = {A} custom-call(%i), {CALLBACK}",
    )
    call = f"  %start = s32[] custom-call(%i), {CALLBACK}"
    program = lines(call, loop("w", 2), install, call.replace("start", "finish"))
    found = hlo.simulate(
        module(program, lines(product("d"), stash, install)), rates=CALL_RATES, callbacks="delayed"
    )
    # The first call ends at 0.5, when the kernels begin, 28e6 / 14e6 = 2 s for each array. d
    # 0.5..2.5, down 2.5..4.5. The host is at the first install at 1.75 and waits for the kernels
    # until 2.5, when the array starts to be loaded, until 4.5. d 4.5..6.5, down 6.5..8.5. The host
    # is at the second one at 3.75 and waits until 4.5: up 4.5..6.5, behind its product. The last
    # array, at 5.125, waits until 6.5 for the kernels, and is loaded in the program's stream,
    # 6.5..8.5. At the end there is nothing left to wait for: two arrays were stored and three were
    # created.
    assert seconds(found) == (8.5, 4, 0)
    assert (found.num_callbacks, found.num_host_waits) == (7, 0)
    assert found.host_wait_seconds == pytest.approx(0.75 + 0.75 + 1.375, abs=1e-6)
    assert found.callback_bytes == {"to_device": 6_000_000, "to_host": 4_000_000}
    assert found.busy["host kernel"] == pytest.approx(6)


def test_an_update_in_forward_waits_for_a_layer_before_its_product():
    call = f"  %start = s32[] custom-call(%i), {CALLBACK}"
    install = f"  %new = {A} custom-call(%i), {CALLBACK}"
    stash = f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}"
    program = lines(
        call, install, loop("w", 2), call.replace("start", "finish"), product("e"), stash
    )
    found = hlo.simulate(
        module(program, lines(install, product("d"))), rates=CALL_RATES, callbacks="in_forward"
    )
    # The kernels of three arrays begin after the first call: 0.5..2.5..4.5..6.5. The embedding is
    # loaded 2.5..4.5, in the program's stream; the first layer 4.5..6.5, and d 6.5..8.5; the second
    # layer 6.5..8.5, and d 8.5..10.5. The last call finds nothing to wait for. e 10.5..12.5, and
    # its gradient is stored until 14.5.
    assert seconds(found) == (14.5, 6, 0)
    assert (found.num_callbacks, found.num_host_waits) == (6, 0)
    assert found.callback_bytes == {"to_device": 6_000_000, "to_host": 2_000_000}
    assert found.busy["host kernel"] == pytest.approx(6)


def test_a_delayed_update_of_parameters_in_host_memory_is_waited_for_at_the_end():
    call = f"  %start = s32[] custom-call(%i), {CALLBACK}"
    body = lines(product("d"), f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}")
    program = lines(call, loop("w", 2), call.replace("start", "finish"))
    found = hlo.simulate(
        module(program, body),
        rates=dataclasses.replace(CALL_RATES, host_kernel=7e6),
        callbacks="delayed",
    )
    # d 0.5..2.5 and 2.5..4.5, down until 4.5 and 6.5; the kernels of both 0.5..8.5. The host waits
    # from 2.25.
    assert seconds(found) == (8.5, 4, 0)
    assert found.host_wait_seconds == pytest.approx(8.5 - 2.25, abs=1e-6)
    assert found.callback_bytes == {"to_device": 0, "to_host": 4_000_000}


def test_layers_are_updated_by_a_worker_beside_the_program():
    body = lines(product("d"), f"  %cb = {A} custom-call(%i, %x), {CALLBACK}")
    takes = [f"  %take{n} = {A} custom-call(%i), {CALLBACK}" for n in range(2)]
    found = hlo.simulate(
        module(lines(loop("w", 4), *takes), body), rates=CALL_RATES, callbacks="update"
    )
    # Python 0.75 where gradients and parameters cross, 0.625 where parameters do. Nothing waits for
    # the device:
    #   d 0..2, down 2..4, kernel 4..6, up 6..8;  d 2..4, down 4..6, kernel 6..8, up 8..10.
    # The third call arrives at 1.5 and waits from 2.25 for the first kernel, until 6:
    #   d 4..6, down 6..8, the first parameters at 8, kernel 8..10, up 10..12.
    # The fourth waits from 6.75 until 8:  d 8..10, down 10..12, kernel 12..14, up 14..16.
    # The others wait from 8.625 until 10 and from 10.625 until 14.
    assert seconds(found) == (16, 8, 0)
    assert (found.num_callbacks, found.num_host_waits) == (6, 0)
    assert found.host_wait_seconds == pytest.approx(3.75 + 1.25 + 1.375 + 3.375, abs=1e-6)
    assert found.callback_bytes == {"to_device": 8_000_000, "to_host": 8_000_000}
    assert found.busy["host kernel"] == pytest.approx(8)


def test_arrays_outside_of_loops_are_updated_one_after_the_other():
    give = f"  %give = s32[] custom-call(%i, %x, %y), {CALLBACK}"
    rows = lines(
        product("d"),
        "  %y = f32[500,1000]{1,0} bitcast(%x)",
        give,
        f"  %take = ({A}, {A}) custom-call(%i), {CALLBACK}",
    )
    found = hlo.simulate(module(rows), rates=CALL_RATES, callbacks="update")
    # d 0..2, down 2..4 and 4..6, kernels 4..6 and 6..8, for each of which the second call waits; up
    # 6..8 and 8..10.
    assert seconds(found) == (10, 2, 0)
    assert found.callback_bytes == {"to_device": 4_000_000, "to_host": 4_000_000}


def test_records_are_read_one_use_ahead():
    body = lines(f"  %cb = {A} custom-call(%i), {CALLBACK}", product("d"))
    found = hlo.simulate(module(loop("w", 2), body), rates=CALL_RATES, callbacks="nvme")
    # Python 0.5 and 0.125. The disk 0.625..2.625, up ..4.625, d ..6.625. The second callback
    # arrives at 3.25, its record read 2.625..4.625; up ..6.625, d ..8.625.
    assert seconds(found) == (8.625, 4, 0)
    assert found.busy["disk"] == pytest.approx(4)


def test_a_record_goes_up_when_its_slot_is_free():
    body = lines(f"  %cb = {A} custom-call(%i), {CALLBACK}", product("d"))
    rates = dataclasses.replace(CALL_RATES, disk_read=4e6, link=0.5e6, memory=4e6)
    found = hlo.simulate(module(loop("w", 2), body), rates=rates, callbacks="nvme")
    # The disk 0.625..1.125, up ..5.125, out of the slot ..6.125, d ..8.125. The second record, read
    # by 1.625, is loaded 6.125..10.125; out of the slot ..11.125, d ..13.125.
    assert found.seconds == pytest.approx(13.125, abs=1e-6)


def test_a_record_is_read_when_a_buffer_is_free():
    body = f"  %cb = {A} custom-call(%i), {CALLBACK}"
    rates = dataclasses.replace(CALL_RATES, disk_read=4e6, link=0.5e6)
    found = hlo.simulate(module(loop("w", 4), body), rates=rates, callbacks="nvme")
    # The disk 0.625..1.125, up ..5.125; read by 1.625, up ..9.125. The third is read once the first
    # is loaded, 5.125..5.625, the fourth once the second is loaded, 9.125..9.625; up ..13.125 and
    # ..17.125.
    assert found.seconds == pytest.approx(17.125, abs=1e-6)
    assert found.host_wait_seconds == pytest.approx(
        0.5 + (5.625 - 2.375) + (9.625 - 6.25), abs=1e-6
    )


def test_a_record_goes_down_when_its_slot_is_free():
    body = lines(f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}", product("d"))
    found = hlo.simulate(
        module(loop("w", 2), body),
        rates=dataclasses.replace(CALL_RATES, link=0.5e6),
        callbacks="nvme",
    )
    # Down 0.625..4.625 during d ..2.625. The slot of the second is free at 4.625, d ..6.625; down
    # ..8.625, written ..10.625.
    assert found.loops[0].seconds == pytest.approx(6.625, abs=1e-6)
    assert found.seconds == pytest.approx(10.625, abs=1e-6)


def test_records_are_written_from_two_buffers():
    body = f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}"
    found = hlo.simulate(module(loop("w", 3), body), rates=CALL_RATES, callbacks="nvme")
    # Callbacks continue at 0.625 and 1.25: down 0.625..2.625 and 2.625..4.625, written 2.625..4.625
    # and 4.625..6.625. The third is at 1.875, is stored 4.625..6.625, is written 6.625..8.625, and
    # waits for the first record's buffer until 4.625.
    assert found.seconds == pytest.approx(8.625, abs=1e-6)
    assert found.callback_bytes == {"to_device": 0, "to_host": 6_000_000}
    assert found.host_wait_seconds == pytest.approx(4.625 - 1.875, abs=1e-6)


def test_the_host_updates_from_the_disk():
    body = f"  %cb = s32[] custom-call(%i, %x), {CALLBACK}"
    rates = dataclasses.replace(CALL_RATES, disk_read=4e6, disk_write=12e6)
    found = hlo.simulate(module(loop("w", 2), body), rates=rates, callbacks="nvme_update")
    # 12e6 bytes of a layer's state are read in 3 s, 0.625..3.625 and, ahead, 3.625..6.625.
    # Gradients are on the host at 2.625, the kernels 3.625..5.625 and 6.625..8.625. The state is
    # written in 1 s, 6.625..7.625 and 8.625..9.625.
    assert found.seconds == pytest.approx(9.625, abs=1e-6)
    assert found.busy["host kernel"] == pytest.approx(4)


def test_a_simulation_says_that_it_is_predicted_and_what_it_assumes():
    text = str(hlo.simulate(module(CALLS), rates="h200", callbacks="update", streams="turns"))
    assert text.startswith(
        "predicted from the compiled program at assumed rates; nothing here was measured"
    )
    assert "streams: four streams in turn, as XLA before 0.12 does" in text
    numbers = [row for row in text.splitlines() if " ms" in row and not row.startswith("  ")]
    assert len(numbers) == 3
    assert all(row.startswith("predicted") for row in numbers)
    assert "products 7e+14" in text
    unknown = f'  %k = {A} custom-call(%x), custom_call_target="mosaic_gpu_v2"'
    assert hlo.simulate(module(unknown), rates=RATES).not_priced == ("mosaic_gpu_v2",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rates": "h300"}, "rates 'h300' are unknown: choose from h200"),
        ({"kernels": "both"}, "kernels='both': choose from exclusive, beside"),
        ({"callbacks": "host"}, "callbacks='host': choose from plain, update"),
        ({"streams": "4"}, "streams='4': choose from turns, direction, each"),
    ],
)
def test_arguments_that_name_nothing_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hlo.simulate(module(product("d")), **arguments)


def test_programs_that_cannot_be_walked_are_refused():
    with pytest.raises(ValueError, match="not scheduled: give the text of a compiled program"):
        hlo.simulate(module(product("d")).replace(", is_scheduled=true", ""))
    with pytest.raises(ValueError, match="no ENTRY, or was cut before it"):
        hlo.simulate(module(product("d")).partition("ENTRY")[0])
    with pytest.raises(
        ValueError, match="text is of type list: give the text of a compiled program"
    ):
        hlo.simulate([])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"thunks are of type str: give what hlo.read_thunks"):
        hlo.simulate(module(product("d")), thunks="dump")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="g is a collective: a program of one device is simulated"):
        hlo.simulate(module(f"  %g = {A} all-reduce(%x), to_apply=%condition"))
    with pytest.raises(ValueError, match="link = 0: it must be a rate, above 0 a second"):
        hlo.Rates(link=0)
    with pytest.raises(ValueError, match="sync_seconds = -1: it must be a duration"):
        hlo.Rates(sync_seconds=-1)

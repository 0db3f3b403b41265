"""Reading compiled programs, on a handwritten program."""

import pytest

from zerojax import hlo

TEXT = """
HloModule step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%body (p: (s32[], bf16[4,64])) -> (s32[], bf16[4,64]) {
  %p = (s32[], bf16[4,64]) parameter(0)
  %shard = bf16[8,64]{1,0} get-tuple-element(%p), index=1
  %gather-start = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%shard), channel_id=1, dimensions={0}
  %gather-done = bf16[64,64]{1,0} all-gather-done(%gather-start)
  %turned = bf16[64,64]{0,1} copy(%gather-done)
  %dot = bf16[64,64]{1,0} dot(%turned, %shard)
  %scatter-start = ((bf16[64,64]{1,0}), bf16[8,64]{1,0}) reduce-scatter-start(%dot), channel_id=2, to_apply=%add
  %scatter-done = bf16[8,64]{1,0} reduce-scatter-done(%scatter-start)
  ROOT %out = (s32[], bf16[4,64]) tuple(%shard, %scatter-done)
}

%condition (p: (s32[], bf16[4,64])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: (s32[], bf16[4,64])) -> f32[] {
  %x = (s32[], bf16[4,64]) parameter(0)
  %early = f32[16]{0} get-tuple-element(%x), index=0
  %kept = f32[128]{0} all-gather(%early), channel_id=3, dimensions={0}
  %loop = (s32[], bf16[4,64]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %loss = f32[] get-tuple-element(%loop), index=0
  %used = f32[] fusion(%kept, %loss), kind=kLoop, calls=%add
  ROOT %norm = f32[] all-reduce(%used), channel_id=4, to_apply=%add
}
"""


def test_collectives_are_counted_by_trips_and_whole_operands():
    assert hlo.collective_bytes(TEXT) == {
        "all-gather": 12 * 64 * 64 * 2 + 128 * 4,
        "reduce-scatter": 12 * 64 * 64 * 2,
        "all-reduce": 4,
    }
    assert hlo.collective_bytes(TEXT, least_bytes=8) == {
        "all-gather": 12 * 64 * 64 * 2 + 128 * 4,
        "reduce-scatter": 12 * 64 * 64 * 2,
    }
    kinds = {(c.op, c.dtype, c.times) for c in hlo.collectives(TEXT)}
    assert kinds == {
        ("all-gather", "bf16", 12),
        ("reduce-scatter", "bf16", 12),
        ("all-gather", "f32", 1),
        ("all-reduce", "f32", 1),
    }


def test_collectives_inside_asynchronous_fusions_are_counted():
    """XLA of jax 0.12 makes kernels of small reductions."""
    reduced = """%add.0 (p: f32[128]) -> f32[128] {
  %p = f32[128]{0} parameter(0)
  ROOT %psum = f32[128]{0} all-reduce(%p), to_apply=%add
}

"""
    fused = (
        "  %start = ((f32[128]{0}), f32[128]{0}) fusion-start(%kept), kind=kCustom, calls=%add.0\n"
    )
    text = TEXT.replace("ENTRY", reduced + "ENTRY").replace("  %used =", fused + "  %used =")
    assert hlo.collective_bytes(text)["all-reduce"] == 4 + 128 * 4


def test_peak_gathered_follows_copies_and_loops():
    matrix = 64 * 64 * 2
    assert (
        hlo.peak_gathered_bytes(TEXT) == 2 * matrix + 128 * 4
    )  # the gather and its copy, inside; %kept lives across
    assert (
        hlo.peak_gathered_bytes(TEXT.replace("copy(%gather-done)", "dot(%gather-done, %shard)"))
        == matrix + 128 * 4
    )


def test_an_asynchronous_copy_is_one_array():
    """Its start returns (copy, source, context), and its done returns the copy."""
    start = "%copying = (bf16[64,64]{0,1}, bf16[64,64]{1,0}, u32[]) copy-start(%gather-done)"
    done = "%turned = bf16[64,64]{0,1} copy-done(%copying)"
    text = TEXT.replace("%turned = bf16[64,64]{0,1} copy(%gather-done)", f"{start}\n  {done}")
    assert hlo.peak_gathered_bytes(text) == hlo.peak_gathered_bytes(TEXT)
    # The source is read until the copy is done.
    between = text.replace(f"  {done}", f"  %held = bf16[8,64]{{1,0}} negate(%shard)\n  {done}")
    assert hlo.peak_gathered_bytes(between) == hlo.peak_gathered_bytes(TEXT)


def test_tuples_of_the_same_tuples_do_not_multiply_what_is_gathered():
    """Forty pairs, each of the previous pair, count a gathered array once and not 2**40 times."""
    pairs = [
        f"  %pair{n + 1} = (f32[128]{{0}}, f32[128]{{0}}) tuple(%pair{n}, %pair{n})"
        for n in range(40)
    ]
    text = TEXT.replace(
        "  %loop =", "\n".join(["  %pair0 = (f32[128]{0}) tuple(%kept)", *pairs, "  %loop ="])
    )
    assert hlo.peak_gathered_bytes(text) == hlo.peak_gathered_bytes(TEXT)


def test_loop_without_a_trip_count_is_refused():
    with pytest.raises(ValueError, match="trip count"):
        hlo.collectives(TEXT.replace("known_trip_count", "other"))

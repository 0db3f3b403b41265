"""What transfers overlap with, in a handwritten program."""

import pytest

from zerojax import hlo

BODY = """
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}

%slice (s: f32[6,4,8], n: s32[]) -> f32[1,4,8] {
  %s = f32[6,4,8]{2,1,0:S(5)} parameter(0)
  %n = s32[] parameter(1)
  ROOT %part = f32[1,4,8]{2,1,0} dynamic-slice(%s, %n, %n, %n), dynamic_slice_sizes={1,4,8}
}

%update-slice (s: f32[6,4,8], part: f32[1,4,8], n: s32[]) -> f32[6,4,8] {
  %s = f32[6,4,8]{2,1,0:S(5)} parameter(0)
  %part = f32[1,4,8]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %whole = f32[6,4,8]{2,1,0:S(5)} dynamic-update-slice(%s, %part, %n, %n, %n)
}

%product (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%inner (i: (f32[8,8])) -> (f32[8,8]) {
  %i = (f32[8,8]{1,0}) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%i), index=0
  %fused = f32[8,8]{1,0} fusion(%x, %x), kind=kCustom, calls=%product
  ROOT %tuple = (f32[8,8]{1,0}) tuple(%fused)
}

%inner_condition (i: (f32[8,8])) -> pred[] {
  %i = (f32[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%body (p: (f32[4,8], f32[6,4,8], s32[])) -> (f32[4,8], f32[6,4,8], s32[]) {
  %p = (f32[4,8]{1,0}, f32[6,4,8]{2,1,0:S(5)}, s32[]) parameter(0)
  %shard = f32[4,8]{1,0} get-tuple-element(%p), index=0
  %stack = f32[6,4,8]{2,1,0:S(5)} get-tuple-element(%p), index=1
  %layer = s32[] get-tuple-element(%p), index=2
  %fetch = ((f32[6,4,8]{2,1,0:S(5)}, s32[]), f32[1,4,8]{2,1,0}, u32[]) fusion-start(%stack, %layer), calls=%slice
  %gather = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%shard), dimensions={0}SYNC
  %whole = f32[8,8]{1,0} constant({...})
  %first = f32[8,8]{1,0} custom-call(%whole, %whole), custom_call_target="__cublas$gemm"
  %fetched = f32[1,4,8]{2,1,0} fusion-done(%fetch)
  %start = (f32[8,8]{1,0}) tuple(%first)
  %loop = (f32[8,8]{1,0}) while(%start), condition=%inner_condition, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %gathered = f32[8,8]{1,0} all-gather-done(%gather)
  %last = f32[8,8]{1,0} dot(%gathered, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %scatter = f32[4,8]{1,0} reduce-scatter(%last), dimensions={0}, to_apply=%add
  %write = ((f32[6,4,8]{2,1,0:S(5)}, f32[1,4,8]{2,1,0}, s32[]), f32[6,4,8]{2,1,0:S(5)}, u32[]) fusion-start(%stack, %fetched, %layer), calls=%update-slice
  %written = f32[6,4,8]{2,1,0:S(5)} fusion-done(%write)
  ROOT %next = (f32[4,8]{1,0}, f32[6,4,8]{2,1,0:S(5)}, s32[]) tuple(%scatter, %written, %layer)
}

%condition (p: (f32[4,8], f32[6,4,8], s32[])) -> pred[] {
  %p = (f32[4,8]{1,0}, f32[6,4,8]{2,1,0:S(5)}, s32[]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p: (f32[4,8], f32[6,4,8], s32[])) -> (f32[4,8], f32[6,4,8], s32[]) {
  %p = (f32[4,8]{1,0}, f32[6,4,8]{2,1,0:S(5)}, s32[]) parameter(0)
  ROOT %while = (f32[4,8]{1,0}, f32[6,4,8]{2,1,0:S(5)}, s32[]) while(%p), condition=%condition, body=%bodyTRIPS
}
"""
ROW = 4 * 8 * 4


def program(is_sync: str = "false", trips: str = "6") -> str:
    sync = f', backend_config={{"collective_backend_config":{{"is_sync":{is_sync}}}}}'
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return BODY.replace("SYNC", sync).replace("TRIPS", known)


def test_spans_count_products_between_start_and_done_loops_as_often_as_they_run():
    found = {s.kind: s for s in hlo.spans(program())}
    assert {kind: s.products for kind, s in found.items()} == {
        "to_device": 1, "all-gather": 4, "reduce-scatter": 0, "to_host": 0,
    }  # fmt: skip
    assert {kind: s.is_async for kind, s in found.items()} == {
        "to_device": True, "all-gather": True, "reduce-scatter": False, "to_host": True,
    }  # fmt: skip
    assert {kind: s.num_bytes for kind, s in found.items()} == {
        "to_device": ROW, "all-gather": 2 * ROW, "reduce-scatter": 2 * ROW, "to_host": ROW,
    }  # fmt: skip
    assert {(s.computation, s.times) for s in found.values()} == {("body", 6)}


def test_spans_of_a_collective_that_xla_runs_alone_are_empty():
    (gather,) = [s for s in hlo.spans(program(is_sync="true")) if s.kind == "all-gather"]
    assert (gather.is_async, gather.products) == (False, 0)


@pytest.mark.parametrize("unknown_trips", [1, 5])
def test_spans_in_a_loop_without_a_trip_count_run_as_often_as_the_caller_says(unknown_trips):
    found = hlo.spans(program(trips=""), unknown_trips)
    assert {s.times for s in found} == {unknown_trips}

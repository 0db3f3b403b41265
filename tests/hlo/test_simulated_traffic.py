"""Which moves cross the link to the host, and by what: handwritten programs and dumps."""

import pytest

from zerojax import hlo

STACK = "f32[4,8,8]{2,1,0:S(5)}"
PART = "f32[1,8,8]{2,1,0}"
CARRY = f"(s32[], {STACK}, {STACK}, {PART})"
LINEAR = ', backend_config={"dynamic_slice_config":{"loop_index":"0","byte_offset":"0","byte_stride":"256"}}'
TEXT = f"""HloModule jit_step, is_scheduled=true

%read (s: {STACK}, i: s32[], z: s32[]) -> {PART} {{
  %s = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] parameter(2)
  ROOT %slice = {PART} dynamic-slice(%s, %i, %z, %z), dynamic_slice_sizes={{1,8,8}}
}}

%write (t: {STACK}, v: {PART}, j: s32[], y: s32[]) -> {STACK} {{
  %t = {STACK} parameter(0)
  %v = {PART} parameter(1)
  %j = s32[] parameter(2)
  %y = s32[] parameter(3)
  ROOT %update = {STACK} dynamic-update-slice(%t, %v, %j, %y, %y){LINEAR}
}}

%body (p: {CARRY}) -> {CARRY} {{
  %p = {CARRY} parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %mu = {STACK} get-tuple-element(%p), index=1
  %nu = {STACK} get-tuple-element(%p), index=2
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %get = (({STACK}, s32[], s32[]), {PART}, u32[]) fusion-start(%mu, %n, %zero), kind=kLoop, calls=%read
  %got = {PART} fusion-done(%get)
  %put = (({STACK}, {PART}, s32[], s32[]), {STACK}, u32[]) fusion-start(%nu, %got, %n, %zero), kind=kCustom, calls=%write
  %nu2 = {STACK} fusion-done(%put)
  %next = s32[] add(%n, %one)
  ROOT %out = {CARRY} tuple(%next, %mu, %nu2, %got)
}}

%condition (q: {CARRY}) -> pred[] {{
  %q = {CARRY} parameter(0)
  ROOT %less = pred[] constant(true)
}}

ENTRY %main (a: {STACK}, b: {STACK}, h: f32[8]) -> {CARRY} {{
  %a = {STACK} parameter(0), metadata={{op_name="state.mu[\\'w\\']"}}
  %b = {STACK} parameter(1), metadata={{op_name="state.nu[\\'w\\']"}}
  %h = f32[8]{{0:S(5)}} parameter(2), metadata={{op_name="state.mu[\\'head\\']"}}
  %start = s32[] constant(0)
  %zeros = {PART} broadcast(%start), dimensions={{}}
  %up = (f32[8]{{0}}, f32[8]{{0:S(5)}}, u32[]) copy-start(%h)
  %head = f32[8]{{0}} copy-done(%up)
  %in = {CARRY} tuple(%start, %a, %b, %zeros)
  ROOT %loop = {CARRY} while(%in), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"4"}}}}
}}
"""
SEQUENCE = """001: kAsyncStart   [source | next=002 (1)] stream=memcpy_h2d_stream, async_id=1
    002: kCopy [source | sink] kCopy
003: kWhile        [prev=001 (1) | sink]
condition:
    004: kCustomKernel [source | sink] wrapped grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    006: kAsyncStart   [source | next=007 (1)] stream=computation_stream[1], async_id=6
        005: kCustomKernel [source | sink] wrapped_dynamic_slice grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
    007: kAsyncStart   [source | sink] stream=computation_stream[2], async_id=7
        009: kDynamicSliceFusion [source | sink] params=1, results=1
            008: kCopy [source | sink] kCopy
    010: kAsyncDone [source | sink] async_id=7
"""
NAMES = {
    1: "up",
    2: "copy",
    3: "loop",
    4: "less",
    5: "slice",
    6: "get",
    7: "put",
    8: "inner",
    9: "update",
    10: "nu2",
}


# The same after XLA's passes have put both slices into a graph; the copy before the loop stays on a
# stream.
IN_GRAPH = SEQUENCE.replace(
    "  body:\n", "  body:\n    000: kCommandBuffer [source | sink]\n"
).replace(
    SEQUENCE.partition("  body:\n")[2],
    "".join(f"    {row}\n" for row in SEQUENCE.partition("  body:\n")[2].splitlines()),
)


def dump(folder, name="module_0001.jit_step", sequence=SEQUENCE, after_passes=None):
    info = [
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{n}"\n    thunk_id: {i}\n  }}\n}}'
        for i, n in NAMES.items()
    ]
    (folder / f"{name}.thunk_sequence.txt").write_text(sequence)
    if after_passes is not None:
        (folder / f"{name}.thunk_sequence_after_thunk_passes.txt").write_text(after_passes)
    (folder / f"{name}.thunk_metadata.txt").write_text("\n".join(info))
    (folder / f"{name}.sm_9.0a_gpu_after_optimizations.txt").write_text(TEXT)
    return folder


def test_a_slice_with_a_descriptor_is_a_copy_and_one_without_a_kernel():
    found = hlo.host_traffic(TEXT)
    assert [
        (m.instruction, m.by, m.direction, m.num_bytes, m.times, m.leaf) for m in found.moves
    ] == [
        ("get", "kernel", "to_device", 256, 4, "state.mu['w']"),
        ("put", "copy", "to_host", 256, 4, "state.nu['w']"),
        ("up", "copy", "to_device", 32, 1, "state.mu['head']"),
    ]
    assert found.by_copies == {"to_device": 32, "to_host": 1024}
    assert found.by_kernels == {"to_device": 1024, "to_host": 0}
    assert found.share_of_copies == pytest.approx(1056 / 2080)
    (kernel,) = found.kernels
    assert (kernel.computation, kernel.shape) == ("body", "f32[4,8,8]")
    assert found.source == "descriptors"
    assert "kernel to_device      4 x           256  state.mu['w'] f32[4,8,8]" in str(found)
    assert not found.has_callbacks
    assert "callbacks" not in str(found)


def test_a_copy_to_the_host_makes_an_array_of_its_own():
    down = '  %v = f32[8]{0} parameter(3), metadata={op_name="x"}\n  %c = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%v)\n'
    found = hlo.host_traffic(TEXT.replace("  %up = ", f"{down}  %up = "))
    assert [(m.leaf, m.shape, m.direction) for m in found.moves if m.instruction == "c"] == [
        ("", "f32[8]", "to_host")
    ]


def test_what_callbacks_move_is_not_counted_and_that_is_said():
    call = '  %cb = f32[8]{0} custom-call(%head), custom_call_target="xla_buffer_python_gpu_callback"\n'
    found = hlo.host_traffic(TEXT.replace("  %in = ", f"{call}  %in = "))
    assert found.has_callbacks
    assert "plus the bytes that callbacks move, which the program does not state" in str(found)
    assert found.moves == hlo.host_traffic(TEXT).moves


def test_thunks_tell_copies_from_kernels_and_name_streams(tmp_path):
    thunks = hlo.read_thunks(dump(tmp_path))
    assert thunks.streams == {
        "up": "memcpy_h2d_stream",
        "get": "computation_stream[1]",
        "put": "computation_stream[2]",
    }
    assert thunks.kinds["put"] == "kAsyncStart/kDynamicSliceFusion/kCopy"
    assert hlo.host_traffic(TEXT, thunks).moves == hlo.host_traffic(TEXT).moves
    assert hlo.host_traffic(TEXT, thunks).source == "thunks"
    # The thunks count, whatever the text suggests.
    (tmp_path / "other").mkdir()
    other = hlo.read_thunks(
        dump(tmp_path / "other", sequence=SEQUENCE.replace("005: kCustomKernel", "005: kCopy"))
    )
    assert hlo.host_traffic(TEXT, other).kernels == ()
    assert hlo.host_traffic(TEXT, other).share_of_copies == 1


def test_copies_in_graphs_are_told_from_those_on_streams(tmp_path):
    thunks = hlo.read_thunks(dump(tmp_path, after_passes=IN_GRAPH))
    assert thunks.in_graphs == {"get", "put", "nu2"}
    assert (thunks.kinds["get"], thunks.kinds["put"]) == (
        "kAsyncStart/kCustomKernel",
        "kAsyncStart/kDynamicSliceFusion/kCopy",
    )
    traffic = hlo.host_traffic(TEXT, thunks)
    assert [m.instruction for m in traffic.moves if m.in_graph] == ["get", "put"]
    # A kernel moves "get": a graph does not change what moves it.
    assert traffic.in_graphs == {"to_device": 0, "to_host": 1024}
    assert traffic.by_copies == {"to_device": 32, "to_host": 1024}
    assert "copies in CUDA graphs  to device          0  to host            1,024" in str(traffic)
    # Without the passes' own list, the first one is what runs.
    before = tmp_path / "before"
    before.mkdir()
    without = hlo.host_traffic(TEXT, hlo.read_thunks(dump(before)))
    assert without.in_graphs == {"to_device": 0, "to_host": 0}
    assert "CUDA graphs" not in str(without)


def test_a_prediction_says_who_makes_the_copies_in_graphs(tmp_path):
    thunks = hlo.read_thunks(
        dump(tmp_path, after_passes=IN_GRAPH.replace("005: kCustomKernel", "005: kCopy"))
    )
    rates = hlo.Rates(
        link=1e6, graph_link=0.5e6, kernel_link=0.25e6, launch_seconds=0, issue_seconds=0
    )
    seconds = {
        who: hlo.simulate(TEXT, rates=rates, thunks=thunks, graphs=who).seconds
        for who in hlo.GRAPHS
    }
    # A loop of 4 iterations, each with 256 bytes up and 256 down, waited for one after the other;
    # before it, a copy on a stream.
    assert seconds["copies"] == pytest.approx(8 * 256 / 0.5e6 + 32 / 1e6, rel=0.01)
    assert seconds["kernels"] == pytest.approx(8 * 256 / 0.25e6 + 32 / 1e6, rel=0.01)
    # Graphs take precedence over the requested streams.
    for who in hlo.GRAPHS:
        assert (
            hlo.simulate(TEXT, rates=rates, thunks=thunks, streams="turns", graphs=who).seconds
            == seconds[who]
        )
    told = str(hlo.simulate(TEXT, rates=rates, thunks=thunks, graphs="kernels"))
    assert "0.00 GB of the copies are nodes of CUDA graphs, assumed to be made by the cores" in told
    assert not hlo.simulate(TEXT, rates=rates).graphs
    with pytest.raises(ValueError, match="graphs='engines': choose from in_turn, copies, kernels"):
        hlo.simulate(TEXT, graphs="engines")


def test_nodes_of_a_graph_run_one_after_another(tmp_path):
    thunks = hlo.read_thunks(
        dump(tmp_path, after_passes=IN_GRAPH.replace("005: kCustomKernel", "005: kCopy"))
    )
    sum_beside_get = f"""  %last = {PART} get-tuple-element(%p), index=3
  %busy = {PART} add(%last, %last)
  %got = """
    text = TEXT.replace("  %got = ", sum_beside_get)
    rates = hlo.Rates(link=1e6, graph_link=1e6, memory=2e6, launch_seconds=0, issue_seconds=0)
    beside, in_turn = (
        hlo.simulate(text, rates=rates, thunks=thunks, graphs=who).seconds
        for who in ("copies", "in_turn")
    )
    # Each of 4 iterations reads and writes 256 bytes at 2 MB/s, while 256 bytes are loaded at 1
    # MB/s.
    assert in_turn - beside == pytest.approx(4 * 256e-6, rel=0.01)


def test_thunks_of_another_program_are_refused(tmp_path):
    thunks = hlo.read_thunks(dump(tmp_path))
    with pytest.raises(ValueError, match="the dump has no thunk for 'fetch'"):
        hlo.host_traffic(TEXT.replace("%get ", "%fetch ").replace("%get)", "%fetch)"), thunks)


def test_a_folder_of_several_programs_wants_the_name_of_one(tmp_path):
    with pytest.raises(ValueError, match="holds no program that XLA dumped for a GPU"):
        hlo.read_thunks(tmp_path)
    dump(tmp_path)
    dump(tmp_path, "module_0002.jit_eval")
    with pytest.raises(
        ValueError,
        match=r"several programs: module_0001\.jit_step\.thunk_sequence\.txt, module_0002",
    ):
        hlo.read_thunks(tmp_path)
    assert hlo.read_thunks(tmp_path, hlo.module_name(TEXT)) == hlo.read_thunks(
        tmp_path / "module_0002.jit_eval.thunk_sequence.txt"
    )
    assert hlo.dumped_text(tmp_path, "jit_eval") == TEXT
    with pytest.raises(ValueError, match=r"thunks are read from a file ...\.thunk_sequence\.txt"):
        hlo.read_thunks(tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt")


def test_elements_of_tuples_may_be_written_by_number():
    """The notation is that of jax 0.12's dumps."""
    short = TEXT
    for name, index in (("n", 0), ("mu", 1), ("nu", 2)):
        rows = [row for row in short.splitlines() if not row.startswith(f"  %{name} = ")]
        short = (
            "\n".join(rows)
            .replace(f"%{name},", f"%p#{index},")
            .replace(f"%{name})", f"%p#{index})")
        )
    assert "%p#1" in short
    assert "get-tuple-element" not in short
    assert hlo.host_traffic(short).moves == hlo.host_traffic(TEXT).moves

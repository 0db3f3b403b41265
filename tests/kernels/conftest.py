"""Kernels are interpreted on the CPU with race detection, and compiled to SASS for absent H200s."""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy
import pytest
from interpreted_clusters import interpret_clusters
from jax._src import effects
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic.interpret import shared_memory
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call
from jax._src.pallas.mosaic_gpu.interpret.params import (
    InterpretGPUParams,
    force_gpu_interpret_mode,
    get_interpret_effects,
)
from jax._src.state import types as state_types
from jax.experimental.mosaic import gpu as mosaic_gpu  # it sets MOSAIC_GPU_CUDA_ROOT  # noqa: F401
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import registers

IS_0_10 = jax.__version__.startswith("0.10.")


@pytest.fixture
def races(monkeypatch) -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return a context in which kernels are interpreted with race detection.

    The context fails if there was a race.
    """
    if IS_0_10:
        _behave_like_hardware(monkeypatch)
        interpret_clusters(monkeypatch)
    # The interpreter ignores which thread has which element, and that of jax 0.10 does not know the
    # keyword.
    mlir.register_lowering(gpu_core.layout_cast_p, lambda _, x, new_layout: [x], platform="cpu")
    monkeypatch.setattr(registers, "load", lambda ref, _: ref[...])  # the same, without a layout
    monkeypatch.setattr(registers, "store", lambda ref, value: ref.__setitem__(..., value))
    # A compiled kernel has no effect; an interpreted one has one, which a checkpoint would refuse.
    allowed = effects.remat_allowed_effects
    monkeypatch.setattr(
        allowed, "_effect_types", allowed._effect_types | set(map(type, get_interpret_effects()))
    )

    @contextlib.contextmanager
    def interpret() -> Iterator[None]:
        with force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
            yield
        state = interpret_pallas_call.get_races()
        assert state is not None, "no kernel was interpreted"
        assert not state.races_found, "the interpreter found a race: its output says where"

    yield interpret
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def _behave_like_hardware(monkeypatch) -> None:
    """Give the interpreter of jax 0.10 the features of later ones, and more.

    TMA reads zeros outside an array and writes nothing there (CUDA's programming guide, 'tensor
    map'). That interpreter raises on the read, and drops the entire copy on the write. Neither it
    nor later interpreters check reads of wgmma for races. Here a product reads its operands when it
    starts, and again when the next product on the same sums starts, since one product is kept in
    flight. The interpreter also lacks transposed operands.
    """
    monkeypatch.setattr(
        shared_memory.Buffer, "__setitem__", shared_memory.Buffer.set_in_bounds_portion
    )

    def zeros_outside(inside: Any, shape: Any, _: Any, dtype: Any, *__: Any) -> Any:
        result = jax.numpy.zeros(shape, dtype).__array__().copy()
        if inside is not None:
            result[tuple(map(slice, inside.shape))] = inside
        return result

    monkeypatch.setattr(gpu_callbacks, "_handle_out_of_bounds_read", zeros_outside)
    load = gpu_callbacks.wgmma_accumulator_deref
    in_flight: dict[Any, list[Any]] = {}

    def key_of(call: dict[str, Any], name: str) -> Any:
        return gpu_callbacks.HostAllocationKey.from_array(call[f"{name}_allocation_key_as_array"])

    def wgmma(**call: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        device, thread = int(call["device_id"]), int(call["thread_id"])
        everywhere = memory.get_global_thread_id(device, thread)
        reads, operands, acc = [], [], key_of(call, "acc")
        for name in ("a", "b"):
            transforms = jax.tree.map(
                int, gpu_callbacks._remove_noop_transforms(call[f"{name}_transforms"])
            )
            indices = [t for t in transforms if not isinstance(t, state_types.TransposeTransform)]
            assert transforms[: len(indices)] == tuple(indices), "a view must be transposed last"
            key, where = key_of(call, name), interpret_utils.to_range(indices)
            reads.append((key, where))
            operand, _, _ = memory.get_buffer_content(key, where, everywhere)
            operands.append(operand.T if (len(transforms) - len(indices)) % 2 else operand)
        for key, where in reads + in_flight.get(acc, []):
            _, _, clock = memory.get_buffer_content(key, where, everywhere)
            gpu_callbacks.get_races().check_read(
                device, thread, clock, key, where, source_info=call["source_info"]
            )
        in_flight[acc] = reads
        total, _, _ = memory.get_buffer_content(acc, (), everywhere)
        with numpy.errstate(
            all="ignore"
        ):  # a warning, which is an error here, would leave other threads waiting
            total = total + numpy.matmul(*operands, dtype=call["acc_dtype"])
        memory.store_buffer_content(acc, (), total, everywhere)
        return call["token"]

    def wgmma_accumulator_deref(**call: Any) -> Any:
        in_flight.pop(key_of(call, "acc"), None)
        return load(**call)

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(gpu_callbacks, "wgmma_accumulator_deref", wgmma_accumulator_deref)


@dataclasses.dataclass(frozen=True)
class Report:
    """The compilers' output for a program with one kernel.

    Attributes:
      hlo: the scheduled program.
      temp_bytes: bytes of its temporaries.
      ptxas: the assembler's report. A kernel is assembled once per process: "" if that happened
        before.
      sass: the kernel's instructions, or "" if it was assembled before.
    """

    hlo: str
    temp_bytes: int
    ptxas: str
    sass: str

    def spill_bytes(self) -> int:
        sizes = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", self.ptxas)
        assert len(sizes) >= 3, f"the assembler's report does not mention spills: {self.ptxas!r}"
        return sum(map(int, sizes))

    def registers(self) -> int:
        return int(re.findall(r"Used (\d+) registers", self.ptxas)[0])

    def count(self, instruction: str) -> int:
        return len(re.findall(rf"\b{instruction}\b", self.sass))


@pytest.fixture
def compile_for_h200(h200_compiler, monkeypatch, tmp_path) -> Callable[..., Report]:
    """Return a function that compiles `f(*abstract arrays)` with one kernel in it, and reports."""
    from zerojax import aot

    root = pathlib.Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])
    disassembler = shutil.which("nvdisasm", path=f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert disassembler, (
        "reading SASS needs nvdisasm: run pip install nvidia-cuda-nvdisasm, or install the extra "
        "`dev`"
    )
    if pathlib.Path(disassembler).parent != root / "bin":  # the compiler searches one folder
        tools = tmp_path / "cuda"
        (tools / "bin").mkdir(parents=True)
        for tool in [*(root / "bin").iterdir(), pathlib.Path(disassembler)]:
            (tools / "bin" / tool.name).symlink_to(tool)
        (tools / "nvvm").symlink_to(root / "nvvm")
        monkeypatch.setenv("MOSAIC_GPU_CUDA_ROOT", str(tools))
    dump = tmp_path / "dump"
    dump.mkdir()
    for what in ("SASS", "PTXAS"):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
    sharding = NamedSharding(aot.gpu_mesh("h200", hosts=1, gpus_per_host=1), PartitionSpec())

    def compile_program(
        f: Callable[..., Any], *arrays: Any, donate: tuple[int, ...] = ()
    ) -> Report:
        arrays = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays
        )
        compiled = (
            jax.jit(f, donate_argnums=donate)
            .trace(*arrays)
            .lower(lowering_platforms=("cuda",))
            .compile()
        )
        stats: Any = compiled.memory_analysis()
        texts = [
            "".join(path.read_text() for path in dump.glob(name)) for name in ("*.ptxas", "*.sass*")
        ]
        for path in dump.iterdir():
            path.unlink()
        return Report(compiled.as_text() or "", stats.temp_size_in_bytes, *texts)

    return compile_program

"""What an operation of a compiled program costs on a device: FLOPs, and bytes read and written.

An operation takes the longest of three times: its FLOPs over its unit's rate, its bytes over the
memory's rate, and a kernel's least duration:

    seconds = max(FLOPs / rate, bytes / memory, launch)

FLOPs are counted for matrix products, from their shapes, and for cuDNN's attention: 4 B H T S D
forward and 2.5 times that backward, and half of it under a causal mask (FlashAttention-2, Dao 2023,
section 4.1). A fusion's bytes are the bytes of its parameters and its result. A parameter that the
fusion only slices counts as the slice; a parameter that it updates in place counts as the updated
part. Any other library call has no known FLOPs: it is priced by its bytes alone and listed as not
priced.
"""

import dataclasses
import math
import re

from zerojax.hlo.parse import Array, Instruction, Module, parse_arrays, parse_ints

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCT = re.compile(r"gemm|matmul|cublas", re.IGNORECASE)
_CONTRACTED = re.compile(r'"?lhs_contracting_(?:dims|dimensions)"?[=:]\s*[{\[]([^}\]]*)')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
_SLICES = ("dynamic-slice", "slice", "gather")
_VIEWS = ("bitcast", "get-tuple-element", "reshape", "convert")
_BACKWARD = 2.5
"""FLOPs of attention's backward over its forward: 5 products of the same size instead of 2."""

PRODUCT = "products"
ATTENTION = "attention"
ELEMENTWISE = "fusions"
DEVICE_COPY = "copies on the device"
CUSTOM = "other calls"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """The cost of running an operation once.

    Attributes:
      kind: "products", "attention", "fusions", "copies on the device" or "other calls".
      flops: floating-point operations.
      num_bytes: bytes read from and written to device memory.
      rate: name of the `Rates` field that the FLOPs are divided by.
      target: target of a library call that is not priced; empty for all other operations.
    """

    kind: str
    flops: float
    num_bytes: int
    rate: str = "products"
    target: str = ""


class Costs:
    """The costs of a program's instructions."""

    def __init__(self, module: Module) -> None:
        """Price the instructions of `module`, a parsed program."""
        self.module = module
        self._fusions: dict[str, tuple[int, float]] = {}

    def price(self, computation: str, i: Instruction) -> Cost:
        """Return the cost of a scheduled instruction; an asynchronous start costs its work.

        Args:
          computation: name of the computation that schedules the instruction.
          i: the instruction.

        Raises:
          ValueError: an attention call does not state the shape of its scores.
        """
        op = i.op.removesuffix("-start")
        if op == "custom-call":
            return self._call(computation, i)
        if op in ("dot", "convolution"):
            return Cost(
                PRODUCT,
                self._product(computation, i),
                self._moved(computation, i),
                self._rate(computation, i),
            )
        if op == "fusion":
            num_bytes, flops = self._fusion(i.called[0])
            return Cost(PRODUCT if flops else ELEMENTWISE, flops, num_bytes)
        if op == "async":
            inner = []
            for called in i.called:
                for x in self.module.instructions(called):
                    if x.op not in ("parameter", *_VIEWS):
                        inner.append(self.price(called, x))
            return max(inner, key=lambda c: (c.flops, c.num_bytes), default=Cost(ELEMENTWISE, 0, 0))
        result_bytes = _shape_bytes(i)
        return Cost(DEVICE_COPY if op == "copy" else ELEMENTWISE, 0, 2 * result_bytes)

    def _dims(self, computation: str, name: str) -> tuple[int, ...]:
        arrays = self._arrays(computation, name)
        return arrays[0].dims if arrays else ()

    def _arrays(self, computation: str, name: str) -> list[Array]:
        i = self.module.computations[computation].instructions.get(name)
        return [] if i is None else parse_arrays(i.shape)

    def _bytes(self, computation: str, name: str) -> int:
        return sum(a.num_bytes for a in self._arrays(computation, name))

    def _moved(self, computation: str, i: Instruction) -> int:
        return sum(self._bytes(computation, o) for o in i.operands) + _shape_bytes(i)

    def _rate(self, computation: str, i: Instruction) -> str:
        lhs = self._arrays(computation, i.operands[0])
        return "products_float32" if lhs and lhs[0].dtype == "f32" else "products"

    def _call(self, computation: str, i: Instruction) -> Cost:
        match = _TARGET.search(i.text)
        target = "" if match is None else match[1]
        if "fmha" in target:
            flops = self._attention(computation, i, is_backward="Backward" in target)
            rate = "attention_backward" if "Backward" in target else "attention"
            return Cost(ATTENTION, flops, self._moved(computation, i), rate)
        if _PRODUCT.search(target):
            # The first result is the product; the others are workspace.
            result = parse_arrays(i.shape)[0].num_bytes
            num_bytes = sum(self._bytes(computation, o) for o in i.operands) + result
            return Cost(
                PRODUCT, self._product(computation, i), num_bytes, self._rate(computation, i)
            )
        return Cost(CUSTOM, 0, self._moved(computation, i), target=target)

    def _product(self, computation: str, i: Instruction) -> float:
        """Return a product's FLOPs: 2 x elements of the result x contracted dims on the left."""
        lhs = self._dims(computation, i.operands[0])
        match = _CONTRACTED.search(i.text)
        contracted = (len(lhs) - 1,) if match is None else parse_ints(match[1])
        result = parse_arrays(i.shape)[0]
        return 2.0 * math.prod(result.dims) * math.prod(lhs[d] for d in contracted)

    def _attention(self, computation: str, i: Instruction, is_backward: bool) -> float:
        scores = _SCORES.search(i.text)
        width = self._dims(computation, i.operands[0])[-1]
        if scores is None:
            raise ValueError(
                f"{i.result}: this attention call does not state the shape of its scores, so its "
                "FLOPs are unknown"
            )
        half = 0.5 if "CAUSAL" in i.text else 1.0
        flops = 4.0 * math.prod(parse_ints(scores[1])) * width * half
        return flops * _BACKWARD if is_backward else flops

    def _fusion(self, name: str) -> tuple[int, float]:
        """Return the bytes that a fusion reads and writes, and its FLOPs."""
        if name not in self._fusions:
            instructions = self.module.instructions(name)
            flops = 0.0
            for i in instructions:
                if i.op == "fusion":
                    flops += self._fusion(i.called[0])[1]
                elif i.op in ("dot", "convolution", "custom-call"):
                    flops += self.price(name, i).flops
            read = sum(self._read(name, i) for i in instructions if i.op == "parameter")
            written = self._written(name, self.module.computations[name].root)
            self._fusions[name] = (read + written, flops)
        return self._fusions[name]

    def _read(self, computation: str, parameter: Instruction) -> int:
        """Return the bytes that a fusion reads from a parameter."""
        instructions = self.module.instructions(computation)
        root = self.module.computations[computation].root
        parameter_bytes = _shape_bytes(parameter)

        def read_of(name: str) -> int:
            total = 0
            for user in instructions:
                if name not in user.operands:
                    continue
                is_first = user.operands[0] == name
                if user.op in _SLICES and is_first:
                    total += _shape_bytes(user)
                elif user.op == "dynamic-update-slice" and is_first:
                    pass  # updated in place
                elif user.op in _VIEWS and user.result != root:
                    total += read_of(user.result)
                else:
                    return parameter_bytes
            return min(total, parameter_bytes)

        return read_of(parameter.result)

    def _written(self, computation: str, name: str) -> int:
        """Return the bytes that a fusion writes to a result; in an update in place, the slice's."""
        instructions = self.module.computations[computation].instructions
        if name not in instructions:
            return 0
        i = instructions[name]
        if i.op == "tuple":
            return sum(self._written(computation, o) for o in i.operands)
        if i.op == "dynamic-update-slice" and i.operands[1] in instructions:
            return self._bytes(computation, i.operands[1])
        if i.op in ("bitcast", "convert", "reshape", "copy") and i.operands:
            source = instructions.get(i.operands[0])
            if source is not None and source.op in ("dynamic-update-slice", "bitcast", "convert"):
                return self._written(computation, source.result)
        return _shape_bytes(i)


def _shape_bytes(i: Instruction) -> int:
    """Return the bytes of an instruction's results."""
    return sum(a.num_bytes for a in parse_arrays(i.shape))

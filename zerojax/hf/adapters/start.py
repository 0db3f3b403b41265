"""A folder's weights with the adapters that training starts from.

`AdaptedFile` looks like the folder, with more tensors: each adapter's matrices, stacked over the
layers, under the names of their parameters. `Remainder` is the folder as an export compares it.

    adapters from PEFT's folder     lora_a, lora_b, lora_m; and the trained copies of modules
    init="pissa"                    lora_a, lora_b; W is replaced by W - s (A B)^T
    use_dora                        lora_m, the norms of W's columns

All other matrices are missing, so that an import initializes them. Numbers are computed or read
when they are asked for, one matrix at a time; PiSSA's A and B are kept, because they are needed for
W, too.
"""

import os
import threading
from collections.abc import Callable

import numpy as np

from host_offload.disk import Box
from zerojax.checkpoint import CheckpointError, first_few
from zerojax.hf.adapters.lora import Lora
from zerojax.hf.adapters.peft import BASE, PREFIX, open_peft, peft_name
from zerojax.hf.adapters.singular import find_factors, product
from zerojax.weights import Place, Tensor, WeightFile

_PIECE = 1 << 24
"""Number of elements read at a time."""
Members = dict[int | None, str]
"""Names of the tensors of one parameter, by layer; None if the parameter is not stacked."""


class Remainder:
    """A folder's weights without the factors that PiSSA's adapters start from.

    Attributes:
      path: path of the base.
      tensors: shapes and dtypes of the base's tensors by their names. A matrix without its factors
        is float32.
      tiled: names of tensors that are known to be stacks of tiles.
    """

    def __init__(
        self, base: WeightFile, place_of: Callable[[str], Place | None], lora: Lora
    ) -> None:
        """Find the adapted matrices.

        Args:
          base: weights of the folder.
          place_of: function from a tensor's name to the place of its parameter in an untiled model.
          lora: options of the adapters.
        """
        self.path = base.path
        self.tiled = base.tiled
        self.tensors = dict(base.tensors)
        self._base = base
        self._lora = lora
        self._lock = threading.Lock()
        self._factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._stems = find_adapted(base, place_of, lora)
        self._adapted = {name for members in self._stems.values() for name in members.values()}
        if lora.init != "default":
            for name in self._adapted:
                self.tensors[name] = Tensor(base.tensors[name].shape, "float32")

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Raises:
          CheckpointError: the file cannot be read.
          ValueError: a matrix has fewer singular values than the rank.
        """
        if self._lora.init == "default" or name not in self._adapted:
            return self._base.read(name, box)
        a, b = self.factors(name)
        rows, columns = box
        subtracted = product(a[slice(*columns)], b[:, slice(*rows)], self._lora.scale)
        weight = np.asarray(self._base.read(name, box), np.float64)
        return np.asarray(weight - subtracted, np.float32)

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the A and B that are subtracted from a matrix with PiSSA's start."""
        with self._lock:
            if name not in self._factors:
                shape = self._base.tensors[name].shape
                if min(shape) < self._lora.rank:
                    raise ValueError(
                        f"rank={self._lora.rank} of a Lora with init={self._lora.init!r}: {name} "
                        f"{list(shape)} has only {min(shape)} singular values"
                    )
                weight = self._base.read(name, tuple((0, n) for n in shape))
                self._factors[name] = find_factors(
                    np.asarray(weight, np.float32),
                    self._lora.rank,
                    self._lora.scale,
                    self._lora.init,
                )
            return self._factors[name]


class AdaptedFile(Remainder):
    """Weights of a folder, with the adapters that training starts from.

    Attributes:
      tensors: also the adapters' matrices, by the names of their parameters.
    """

    def __init__(
        self,
        base: WeightFile,
        place_of: Callable[[str], Place | None],
        lora: Lora,
        adapters: str | os.PathLike[str] | None = None,
    ) -> None:
        """Find the adapted matrices.

        Args:
          base: weights of the folder.
          place_of: function from a tensor's name to the place of its parameter in an untiled model.
          lora: options of the adapters.
          adapters: folder of adapters to start from; None starts new ones.

        Raises:
          CheckpointError: the folder of adapters lacks tensors, or has others.
        """
        super().__init__(base, place_of, lora)
        self._peft = None if adapters is None else open_peft(adapters)
        self._norms: dict[str, np.ndarray] = {}
        self._saved: dict[str, str] = {}
        for name in base.tensors:
            if place_of(name) is not None and lora.saves(name.rpartition(".")[0]):
                self._saved[name] = f"{PREFIX}{name}"
        self._matrices = {
            f"{stem}.lora.{matrix}": (stem, matrix)
            for stem in self._stems
            for matrix in self._list_matrices()
        }
        if self._peft is not None:
            self._check_names(self._peft)
        for name, (stem, matrix) in self._matrices.items():
            self.tensors[name] = Tensor(self._shape(stem, matrix), "float32")

    def _list_matrices(self) -> list[str]:
        """Return the names of an adapter's matrices that this file provides."""
        has_factors = self._peft is not None or self._lora.init != "default"
        matrices = ["lora_a", "lora_b"] if has_factors else []
        return [*matrices, "lora_m"] if self._lora.use_dora else matrices

    def _check_names(self, peft: WeightFile) -> None:
        """Raise CheckpointError if a folder of adapters lacks tensors, or has others."""
        expected = {saved: self._base.tensors[name].shape for name, saved in self._saved.items()}
        for stem, members in self._stems.items():
            for name in members.values():
                for matrix in self._list_matrices():
                    shape = self._layer_shape(stem, matrix)[::-1]
                    expected[peft_name(name.removesuffix(".weight"), matrix)] = shape
        differences = [f"no {name}" for name in sorted(expected.keys() - peft.tensors.keys())]
        for name in sorted(peft.tensors.keys() - expected):
            if not self._is_base(peft, name):
                differences.append(f"{name}, which this model does not have")
        for name, shape in expected.items():
            if name in peft.tensors and peft.tensors[name].shape != shape:
                has = list(peft.tensors[name].shape)
                differences.append(f"{name} {has}, and here it is {list(shape)}")
        if differences:
            raise CheckpointError(f"{peft.path} holds other adapters: {first_few(differences)}")

    def _is_base(self, peft: WeightFile, name: str) -> bool:
        """Return whether a tensor of PEFT's file holds the base's own weights, unchanged."""
        base_name = name.removeprefix(PREFIX).removesuffix(BASE) + ".weight"
        if not name.endswith(BASE) or base_name not in self._adapted:
            return False
        tensor = peft.tensors[name]
        if tensor.shape != self._base.tensors[base_name].shape:
            return False
        boxes = [(rows, *((0, n) for n in tensor.shape[1:])) for rows in _cut(tensor.shape)]
        return all(
            np.array_equal(
                np.asarray(peft.read(name, box), np.float32),
                np.asarray(self._base.read(base_name, box), np.float32),
            )
            for box in boxes
        )

    def _shape(self, stem: str, matrix: str) -> tuple[int, ...]:
        """Return the shape of the parameter of an adapter's matrix, over all layers."""
        members = self._stems[stem]
        lead = () if None in members else (len(members),)
        return (*lead, *self._layer_shape(stem, matrix))

    def _layer_shape(self, stem: str, matrix: str) -> tuple[int, ...]:
        """Return the shape of an adapter's matrix, in one layer."""
        d_out, d_in = self._base.tensors[next(iter(self._stems[stem].values()))].shape
        if stem.endswith("embed_tokens"):
            d_out, d_in = d_in, d_out
        rank = self._lora.rank
        shapes = {"lora_a": (d_in, rank), "lora_b": (rank, d_out), "lora_m": (d_out,)}
        return shapes[matrix]

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Raises:
          CheckpointError: a file cannot be read.
        """
        if name in self._matrices:
            stem, matrix = self._matrices[name]
            members = self._stems[stem]
            if None in members:
                return self._matrix(members[None], matrix)[_index(box)]
            layers = range(*box[0])
            parts = [self._matrix(members[layer], matrix)[_index(box[1:])] for layer in layers]
            return np.stack(parts)
        if self._peft is not None and name in self._saved:
            return self._peft.read(self._saved[name], box)
        return super().read(name, box)

    def _matrix(self, name: str, matrix: str) -> np.ndarray:
        """Return a matrix of the adapter of one tensor of the base, in float32."""
        if self._peft is not None:
            peft_tensor = peft_name(name.removesuffix(".weight"), matrix)
            shape = self._peft.tensors[peft_tensor].shape
            values = self._peft.read(peft_tensor, tuple((0, n) for n in shape))
            return np.asarray(values, np.float32).T
        if matrix == "lora_m":
            return self._column_norms(name)
        return self.factors(name)[matrix == "lora_b"]

    def _column_norms(self, name: str) -> np.ndarray:
        """Return the norms f32[out] of a matrix W[out, in] of the base, one for each output."""
        with self._lock:
            if name not in self._norms:
                shape = self._base.tensors[name].shape
                norms = []
                for rows in _cut(shape):
                    weight = np.asarray(self._base.read(name, (rows, (0, shape[1]))), np.float64)
                    norms.append(np.linalg.norm(weight, axis=1))
                self._norms[name] = np.concatenate(norms).astype(np.float32)
            return self._norms[name]


def find_adapted(
    base: WeightFile, place_of: Callable[[str], Place | None], lora: Lora
) -> dict[str, Members]:
    """Return the tensors that have adapters, by the name of their module's parameters.

    For example {"blocks.self_attn.q_proj": {0: "model.layers.0.self_attn.q_proj.weight", ...}}.

    Args:
      base: weights of the folder.
      place_of: function from a tensor's name to the place of its parameter in an untiled model.
      lora: options of the adapters.
    """
    stems: dict[str, Members] = {}
    for name in base.tensors:
        place = place_of(name)
        if place is None:
            continue
        stem, _, ending = place.name.rpartition(".")
        if ending in ("kernel", "embedding") and stem.rpartition(".")[2] in lora.targets:
            stems.setdefault(stem, {})[place.layer] = name
    return stems


def _cut(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranges of rows with a limited number of elements."""
    step = max(1, _PIECE // max(1, int(np.prod(shape[1:]))))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)

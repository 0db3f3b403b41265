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
from collections.abc import Callable, Mapping

import numpy as np

from host_offload.disk import Box
from zerojax.checkpoint import CheckpointError, first_few
from zerojax.hf.adapters.lora import Lora, module_of
from zerojax.hf.adapters.peft import BASE, PREFIX, open_peft, peft_name
from zerojax.hf.adapters.singular import find_factors, product
from zerojax.hf.mixtures.stacks import BLOCKS, stack_of
from zerojax.weights import LAYER, DividedFile, Place, Tensor, WeightFile

_PIECE = 1 << 24
"""Number of elements read at a time."""
Table = Mapping[str, tuple[Place, ...]]
"""Parameters for each tensor name of a folder, as `map_names` returns them."""
Members = dict[int | None, str]
"""Names of the tensors of one parameter, by layer; None if the parameter is not stacked."""


def adapted_stem(name: str) -> str:
    """Return the name of the module whose adapter changes a parameter; "" if it is no matrix."""
    stem, _, ending = name.rpartition(".")
    if ending in ("kernel", "embedding"):
        return stem
    # The weights of a tiled MLP have the names of their projections.
    return f"{name}_proj" if ending in ("gate", "up", "down") else ""


def find_adapted(places: Mapping[str, Place], lora: Lora) -> dict[str, Members]:
    """Return the tensors that have adapters, by the name of their module's parameters.

    For example {"blocks.self_attn.q_proj": {0: "model.layers.0.self_attn.q_proj.weight", ...}}.

    Args:
      places: places of a folder's tensors.
      lora: options of the adapters.
    """
    stems: dict[str, Members] = {}
    for name, place in places.items():
        stem = adapted_stem(place.name)
        if stem.rpartition(".")[2] in lora.targets:
            stems.setdefault(stem, {})[place.layer] = name
    return stems


def find_saved(places: Mapping[str, Place], lora: Lora) -> list[str]:
    """Return the tensors of modules that are trained in full."""
    return [name for name, place in places.items() if lora.saves(module_at(place))]


def module_at(place: Place) -> str:
    """Return the name of a parameter's module, as `Lora.saves` compares it."""
    part, *path = place.name.split(".")
    if part in ("embed", "head"):
        return module_of(tuple(path))
    stack = stack_of(place.name)
    name = place.name.removeprefix(BLOCKS).removeprefix(f"{stack}." if stack else "")
    return module_of(tuple(name.split(".")), place.layer or 0)


def build_names(table: Table) -> Callable[[Place], str]:
    """Return a function from a place to the name of its tensor in transformers.

    If a parameter has several names in the table, it is the first; if none, the parameter's own.
    """
    patterns: dict[tuple[str, int | None], str] = {}
    for pattern, places in table.items():
        for place in places:
            patterns.setdefault((place.name, place.layer), pattern)

    def name(place: Place) -> str:
        pattern = patterns.get((place.name, place.layer)) or patterns.get((place.name, None))
        return place.name if pattern is None else pattern.replace(LAYER, str(place.layer))

    return name


class Remainder(DividedFile):
    """A folder's weights without the factors that PiSSA's adapters start from.

    Attributes:
      tensors: as of a `DividedFile`; a matrix without its factors is float32.
    """

    def __init__(self, file: WeightFile, table: Table, lora: Lora) -> None:
        """Find the adapted matrices.

        Args:
          file: weights of the folder.
          table: parameters for each tensor name.
          lora: options of the adapters.
        """
        super().__init__(file, table)
        self._lora = lora
        self._lock = threading.Lock()
        self._factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._stems = find_adapted(self.places, lora)
        self._adapted = {name for members in self._stems.values() for name in members.values()}
        if lora.init != "default":
            for name in self._adapted:
                self.tensors[name] = Tensor(self.tensors[name].shape, "float32")

    def read(self, name: str, box: Box) -> np.ndarray:
        """Return a part of a tensor.

        Raises:
          CheckpointError: the file cannot be read.
          ValueError: a matrix has fewer singular values than the rank.
        """
        if self._lora.init == "default" or name not in self._adapted:
            return super().read(name, box)
        a, b = self.factors(name)
        rows, columns = box
        subtracted = product(a[slice(*columns)], b[:, slice(*rows)], self._lora.scale)
        weight = np.asarray(super().read(name, box), np.float64)
        return np.asarray(weight - subtracted, np.float32)

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the A and B that are subtracted from a matrix with PiSSA's start."""
        with self._lock:
            if name not in self._factors:
                shape = self.tensors[name].shape
                if min(shape) < self._lora.rank:
                    raise ValueError(
                        f"rank={self._lora.rank} of a Lora with init={self._lora.init!r}: {name} "
                        f"{list(shape)} has only {min(shape)} singular values"
                    )
                weight = super().read(name, tuple((0, n) for n in shape))
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
        file: WeightFile,
        table: Table,
        lora: Lora,
        adapters: str | os.PathLike[str] | None = None,
    ) -> None:
        """Find the adapted matrices.

        Args:
          file: weights of the folder.
          table: parameters for each tensor name.
          lora: options of the adapters.
          adapters: folder of adapters to start from; None starts new ones.

        Raises:
          CheckpointError: the folder of adapters lacks tensors, or has others.
        """
        super().__init__(file, table, lora)
        self._peft = None if adapters is None else open_peft(adapters)
        self._norms: dict[str, np.ndarray] = {}
        self._name = build_names(table)
        self._saved: dict[str, str] = {}
        if self._peft is not None:
            for name in find_saved(self.places, lora):
                self._saved[name] = f"{PREFIX}{self._name(self.places[name])}"
        self._matrices = {
            f"{stem}.lora.{matrix}": (stem, matrix)
            for stem in self._stems
            for matrix in self._list_matrices()
        }
        if self._peft is not None:
            self._check_names(self._peft)
        for name, (stem, matrix) in self._matrices.items():
            self.tensors[name] = Tensor(self._shape(stem, matrix), "float32")

    def rename(self, name: str) -> Place:
        """Return the place of a tensor, for `import_params`: tensors are divided already."""
        place = self.places.get(name)
        return Place(name) if place is None else place._replace(part=None)

    def _module(self, name: str) -> str:
        """Return the name in transformers of an adapted matrix's module.

        Raises:
          CheckpointError: the matrix is a part of a tensor, for which PEFT has one adapter.
        """
        place = self.places[name]
        tensor = self._name(place)
        if place.part is not None:
            raise CheckpointError(
                f"{self.path} holds {place.name} in one matrix with others, {tensor}, for which "
                "PEFT has one adapter: such adapters cannot be read"
            )
        return tensor.removesuffix(".weight")

    def _list_matrices(self) -> list[str]:
        """Return the names of an adapter's matrices that this file provides."""
        has_factors = self._peft is not None or self._lora.init != "default"
        matrices = ["lora_a", "lora_b"] if has_factors else []
        return [*matrices, "lora_m"] if self._lora.use_dora else matrices

    def _check_names(self, peft: WeightFile) -> None:
        """Raise CheckpointError if a folder of adapters lacks tensors, or has others."""
        expected = {saved: self.tensors[name].shape for name, saved in self._saved.items()}
        for stem, members in self._stems.items():
            for name in members.values():
                for matrix in self._list_matrices():
                    shape = self._layer_shape(stem, matrix)[::-1]
                    expected[peft_name(self._module(name), matrix)] = shape
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
        if not name.endswith(BASE):
            return False
        module = name.removeprefix(PREFIX).removesuffix(BASE)
        adapted = [tensor for tensor in self._adapted if self._module(tensor) == module]
        shape = peft.tensors[name].shape
        if not adapted or shape != self.tensors[adapted[0]].shape:
            return False
        boxes = [(rows, *((0, n) for n in shape[1:])) for rows in _cut(shape)]
        return all(
            np.array_equal(
                np.asarray(peft.read(name, box), np.float32),
                np.asarray(DividedFile.read(self, adapted[0], box), np.float32),
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
        d_out, d_in = self.tensors[next(iter(self._stems[stem].values()))].shape
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
            peft_tensor = peft_name(self._module(name), matrix)
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
                shape = self.tensors[name].shape
                norms = []
                for rows in _cut(shape):
                    weight = DividedFile.read(self, name, (rows, (0, shape[1])))
                    norms.append(np.linalg.norm(np.asarray(weight, np.float64), axis=1))
                self._norms[name] = np.concatenate(norms).astype(np.float32)
            return self._norms[name]


def _cut(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return ranges of rows with a limited number of elements."""
    step = max(1, _PIECE // max(1, int(np.prod(shape[1:]))))
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)

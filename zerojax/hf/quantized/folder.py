"""Open the weights of a Hugging Face folder, decoded if they are quantized.

    quant_method       weights
    "bitsandbytes"     decoded as they are read (`zerojax.hf.quantized.bitsandbytes`)
    "mxfp4"            decoded as they are read (`zerojax.hf.quantized.mxfp4`)
    "fp8"              decoded as they are read (`zerojax.hf.quantized.fp8`)
    any other one      refused by name

Decoded weights are weights in 16 or 32 bits like any others: an export writes them so, without
`quantization_config`.
"""

import os
import reprlib
from collections.abc import Mapping
from typing import Any

from zerojax.hf.quantized.bitsandbytes import BitsAndBytesFile
from zerojax.hf.quantized.fp8 import Fp8File
from zerojax.hf.quantized.mxfp4 import Mxfp4File
from zerojax.weights import DTYPES, WeightFile, open_weights

QUANTIZATION = "quantization_config"
"""Key of `config.json` that describes quantized weights."""
_BITSANDBYTES = "bitsandbytes"
_MXFP4 = "mxfp4"
_FP8 = "fp8"


def quant_method(raw: Mapping[str, Any]) -> str | None:
    """Return how a folder's weights are quantized, or None if they are not.

    Args:
      raw: object in `config.json`.
    """
    for key in (QUANTIZATION, "quantization"):
        quantization = raw.get(key)
        if not quantization:
            continue
        if not isinstance(quantization, Mapping):
            return reprlib.repr(quantization)
        method = quantization.get("quant_method")
        # Older files of bitsandbytes do not name it.
        is_older = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")
        if method is None and is_older:
            return _BITSANDBYTES
        return method if isinstance(method, str) else reprlib.repr(method or "unknown")
    return None


def is_decoded(raw: Mapping[str, Any]) -> bool:
    """Return whether a folder's weights are quantized in a way that is decoded.

    Args:
      raw: object in `config.json`.
    """
    return quant_method(raw) in (_BITSANDBYTES, _MXFP4, _FP8)


def open_decoded(folder: str | os.PathLike[str], raw: Mapping[str, Any]) -> WeightFile:
    """Open a folder's weights, decoded if they are quantized.

    Args:
      folder: path of the folder.
      raw: object in its `config.json`.

    Raises:
      CheckpointError: the folder holds no weights, or quantized weights in another format.
    """
    file = open_weights(folder)
    if not is_decoded(raw):
        return file
    if quant_method(raw) == _MXFP4:
        return Mxfp4File(file)
    if quant_method(raw) == _FP8:
        dtype = raw.get("dtype") or raw.get("torch_dtype")
        return Fp8File(file, raw[QUANTIZATION], dtype if dtype in DTYPES else "bfloat16")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return BitsAndBytesFile(file, dtype if dtype in DTYPES else "float16")

"""Words that configs and commands share.

The modules that give them their meaning take seconds to import.
"""

MODES = ("everything", "save", "selective", "remat")
"""Modes of saving a layer's activations on the device (`zerojax.activations`)."""
PRECISION_NAMES = ("fp32", "bf16", "fp16")
"""Keys of `zerojax.precision.PRECISIONS`."""
EXPORT_FORMATS = ("orbax", "safetensors", "hf", "peft")
"""Formats that `zerojax export` writes."""
EXPORT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Keys of `zerojax.weights.DTYPES`."""

"""Words that configs and commands share, apart from what they stand for, which takes seconds to
import.
"""

MODES = ("everything", "save", "selective", "remat")
"""What a layer keeps from forward to backward on the device (`zerojax.activations`)."""
PRECISION_NAMES = ("fp32", "bf16", "fp16")
"""The keys of `zerojax.precision.PRECISIONS`."""
EXPORT_FORMATS = ("orbax", "safetensors", "hf", "peft")
"""What `zerojax export` writes."""
EXPORT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""The keys of `zerojax.weights.DTYPES`."""

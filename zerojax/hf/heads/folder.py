"""The head that a folder's `config.json` names: next tokens, or scores of sequences."""

import os

from zerojax.hf.config import CONFIG, read_config

_CLASSIFIER = "ForSequenceClassification"


def read_num_labels(folder: str | os.PathLike[str]) -> int | None:
    """Return the number of labels of a folder's classifier; None for a causal model.

    As in transformers it is the size of `id2label`, else `num_labels`, else 2.

    Args:
      folder: path of a folder that holds `config.json`.

    Raises:
      ValueError: the number is not a positive integer.
    """
    folder = os.path.expanduser(os.fspath(folder))
    raw = read_config(folder)
    names = raw.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(_CLASSIFIER) for name in names):
        return None
    labels = raw.get("id2label")
    number = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(
            f"{os.path.join(folder, CONFIG)} has num_labels={number!r}: a positive integer is "
            "needed"
        )
    return number

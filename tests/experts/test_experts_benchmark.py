"""benchmarks/experts.py compares models of equal active parameters, seed by seed."""

import experts
import numpy as np
import pytest

SIZES = ["--layers=1", "--hidden=16", "--seq=16", "--batch=4", "--steps=10", "--seeds=2"]


def test_table_has_differences_between_runs_of_one_seed():
    options = experts.parse(SIZES)
    dense, sparse = experts.build_configs(options)
    found = {name: [] for name in (dense, sparse)}
    for seed in range(2):
        for name, less in ((dense, 0.0), (sparse, 0.1 * (seed + 1))):
            losses = np.r_[np.full(8, 9.0), 2 + seed, 2 + seed]  # the last fifth counts
            found[name].append(experts.Found(losses, np.full(10, less), 3 + seed - less, 0.9))
    rows = experts.table(found, options, "command", 60.0).splitlines()[-2:]
    assert rows[0].startswith("| dense | ")
    assert rows[0].endswith(
        "| 0.0 % | 2.5000 (2.0000 to 3.0000) | 3.5000 (3.0000 to 4.0000) | "
        "+0.0000 (+0.0000 to +0.0000) | 100 |"
    )
    assert rows[1].startswith("| 8 experts | ")
    assert rows[1].endswith("| -0.1500 (-0.2000 to -0.1000) | 100 |")
    with pytest.raises(ValueError, match="4 x 16 does not divide by --top-k 3"):
        experts.build_configs(experts.parse([*SIZES, "--top-k", "3"]))


@pytest.mark.exhaustive
def test_both_models_train(tmp_path):
    for i in range(40):
        text = f"file {i}: the quick brown fox jumps over the lazy dog. " * 20
        (tmp_path / f"{i}.txt").write_text(text)
    options = experts.parse([*SIZES, "--data", str(tmp_path)])
    for name, c in experts.build_configs(options).items():
        found = experts.train(c, 0, options)
        assert found.losses[-1] < found.losses[0]
        assert np.all(found.dropped == 0) == (name == "dense")

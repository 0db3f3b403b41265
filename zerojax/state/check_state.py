"""Checks that a program can take a state: it was not donated, and it has the program's layout."""

import jax

from zerojax.state.host_memory import is_away
from zerojax.state.layout import Layout
from zerojax.state.train_state import TrainState, as_arguments, check_is_array, check_is_there


class StateCheck:
    """Compares states with a layout before every step, and so keeps what it expects of them."""

    def __init__(self, layout: Layout) -> None:
        leaves, self._structure = jax.tree.flatten(layout.abstract_state)
        self._expected = [(leaf.shape, is_away(leaf)) for leaf in leaves]

    def __call__(self, state: TrainState) -> None:
        """Raise ValueError for a state that was donated, or that another program made, or what is none."""
        check_is_there(state)
        leaves, structure = jax.tree.flatten(as_arguments(state))
        if structure != self._structure:
            raise ValueError(
                "this state is of another structure than this program's: it was made by a program of another config"
            )
        for i, (leaf, (shape, away)) in enumerate(zip(leaves, self._expected, strict=True)):
            check_is_array(leaf)
            if is_away(leaf) != away or leaf.shape != shape:
                path = jax.tree_util.tree_flatten_with_path(as_arguments(state))[0][i][0]
                places = ["host memory" if is_host else "device memory" for is_host in (is_away(leaf), away)]
                raise ValueError(
                    f"this state's {jax.tree_util.keystr(path)} is {leaf.shape} in {places[0]}, and this program's is {shape} "
                    f"in {places[1]}: it was made by a program of another model or config"
                )

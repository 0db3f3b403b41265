"""Names for pytrees whose structure belongs to the user's model or optimizer.

Type checkers see `Any`, since the structure is known only when a program is built. The name says
which tree an argument is:

    Params       parameters of a model, or of one of its layers
    Grads        gradients, with the structure of the parameters
    OptState     optimizer state, as `tx.init` returns it
    ModelState   state of a model that its steps update, such as running means
    Batch        arrays whose first dim is the batch
    Context      arrays computed from a batch once, which every layer reads
    Tree         any pytree

A tree of `jax.ShapeDtypeStruct` in the place of arrays has the same name; the argument that holds
it is then called `abstract_x`.
"""

from typing import Any

Params = Any
Grads = Any
OptState = Any
ModelState = Any
Batch = Any
Context = Any
Tree = Any

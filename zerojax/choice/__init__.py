"""Which activations each layer keeps, offloads or recomputes: options per layer, and a choice.

The choice is made for all layers together and is exact within a gap. All functions are pure.
"""

from zerojax.choice.choice import Choice as Choice
from zerojax.choice.choice import Problem as Problem
from zerojax.choice.choice import by_greedy as by_greedy
from zerojax.choice.choice import by_milp as by_milp
from zerojax.choice.layer_choices import LayerOption as LayerOption
from zerojax.choice.layer_choices import Value as Value
from zerojax.choice.layer_choices import layer_options as layer_options

"""What a trained state gives: the perplexity of held-out batches, and texts that go on from
prompts.
"""

from zerojax.inference.evaluate import Evaluation as Evaluation
from zerojax.inference.evaluate import perplexity as perplexity
from zerojax.inference.generate import generate as generate

"""Use of a trained state: perplexity of held-out batches, and text generation from prompts."""

from zerojax.inference.evaluate import Evaluation as Evaluation
from zerojax.inference.evaluate import perplexity as perplexity
from zerojax.inference.generate import generate as generate

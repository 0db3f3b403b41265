"""Data for fine-tuning: conversations, prompts, texts or preferences, tokenized and packed."""

from zerojax.data.batches import Batches as Batches
from zerojax.data.batches import StreamedBatches as StreamedBatches
from zerojax.data.batches import batches as batches
from zerojax.data.batches import batches_once as batches_once
from zerojax.data.chat import prompt_tokens as prompt_tokens
from zerojax.data.corpora.mixing import Mixture as Mixture
from zerojax.data.corpora.mixing import mix as mix
from zerojax.data.corpora.streaming import Stream as Stream
from zerojax.data.corpora.streaming import stream as stream
from zerojax.data.examples import Examples as Examples
from zerojax.data.examples import tokenize as tokenize
from zerojax.data.packing import Rows as Rows
from zerojax.data.packing import best_fit as best_fit
from zerojax.data.packing import pack as pack
from zerojax.data.preferences.records import Preferences as Preferences
from zerojax.data.preferences.records import read_preferences as read_preferences
from zerojax.data.preferences.rows import PairRows as PairRows
from zerojax.data.preferences.rows import pack_pairs as pack_pairs
from zerojax.data.tokenizer_files import load_tokenizer as load_tokenizer
from zerojax.data.tokenizer_files import read_template as read_template

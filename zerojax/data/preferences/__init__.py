"""Data for preference training: chosen and rejected answers, or answers with a label.

    pairs = read_preferences("pairs.jsonl", tokenizer)      TRL's columns, texts or conversations
    rows  = pack_pairs(pairs, seq=1024)                     both answers of a pair in one row
    data  = batches(rows, batch_size=8)

Records and labels are in `records`, the packing in `rows`.
"""

from zerojax.data.preferences.records import Preferences as Preferences
from zerojax.data.preferences.records import read_preferences as read_preferences
from zerojax.data.preferences.rows import PairRows as PairRows
from zerojax.data.preferences.rows import pack_pairs as pack_pairs

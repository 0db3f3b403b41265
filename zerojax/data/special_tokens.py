"""Special tokens at the edges of texts and answers.

A text may come from the tokenizer's own template, and then has the tokens that begin and end a
sequence. They are not added again. An answer should end with a special token that counts: otherwise
the model does not learn to stop.
"""

import dataclasses
from typing import Any

import numpy as np

from zerojax.data.chat import Template

_PROBE = "An answer."


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """A text as tokens.

    Attributes:
      text: what was tokenized.
      tokens: i32[n].
      starts: i64[n], the first character of each token.
      ends: i64[n], the character after it; a token that the tokenizer adds is [0, 0).
    """

    text: str
    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def is_blank(self, i: int) -> bool:
        """Return whether a token is white space."""
        return self.text[self.starts[i] : self.ends[i]].isspace()

    def in_span(self, start: int, end: int) -> np.ndarray:
        """Return the tokens of which a part is in [start, end) of the text, bool[n]."""
        return (self.starts < self.ends) & (self.starts < end) & (self.ends > start)

    def last_visible(self, stop: int) -> int:
        """Return the last token before `stop` that is no white space; -1 if all are."""
        i = stop - 1
        while i >= 0 and self.is_blank(i):
            i -= 1
        return i


class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
      ids: all of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._tokenizer = tokenizer
        self.ids = {*tokenizer.all_special_ids, *(token for token, kind in added if kind.special)}

    def tokenized(self, text: str, add_special_tokens: bool) -> Tokenized:
        """Return a text as tokens, with those that the tokenizer adds unless the text has them
        already.
        """
        out = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        starts, ends = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2).T
        found = Tokenized(text, np.asarray(out["input_ids"], np.int32), starts, ends)
        kept = (
            _added_once(found, np.asarray(out["special_tokens_mask"], bool))
            if add_special_tokens
            else slice(None)
        )
        return Tokenized(text, found.tokens[kept], starts[kept], ends[kept])

    def stop_after(self, tokenized: Tokenized, first: int, stop: int) -> int | None:
        """Return where the tokens of an answer stop, with the special token that ends it; None if
        none does.

        Args:
          tokenized: a conversation.
          first: of the tokens that the template writes with the answer.
          stop: the token after these.
        """
        last = tokenized.last_visible(stop)
        if last >= first and int(tokenized.tokens[last]) in self.ids:
            return stop
        after, count = stop, len(tokenized.tokens)
        while after < count and tokenized.is_blank(after):
            after += 1
        return after + 1 if after < count and int(tokenized.tokens[after]) in self.ids else None

    def turn_end(self, template: Template) -> int | None:
        """Return the special token that ends an answer in a chat template; None if none does."""
        messages = [
            {"role": "user", "content": "A question."},
            {"role": "assistant", "content": _PROBE},
        ]
        try:
            text = template.render(template.with_contents(messages, None), None)
        except ValueError:
            return None
        _, probe, end = text.rpartition(_PROBE)
        if not probe:
            return None
        after = self._tokenizer(end, add_special_tokens=False)["input_ids"]
        return next((token for token in after if token in self.ids), None)


def _added_once(tokenized: Tokenized, is_added: np.ndarray) -> slice:
    """Return the tokens to keep: without those at the edges that the tokenizer added to a text that
    has them by itself.
    """
    inner = np.flatnonzero(~is_added)
    tokens, count = tokenized.tokens, len(is_added)
    if not inner.size:
        return slice(None)
    head, stop = int(inner[0]), int(inner[-1]) + 1
    tail = tokens[stop:]
    last = tokenized.last_visible(stop) + 1
    begins_with_it = np.array_equal(tokens[:head], tokens[head : min(2 * head, stop)])
    ends_with_it = np.array_equal(tail, tokens[max(head, last - len(tail)) : last])
    return slice(head if begins_with_it else 0, stop if ends_with_it else count)

"""Special tokens at the edges of texts and answers.

A text that was rendered by the tokenizer's own template already has the tokens that begin and end a
sequence; they are not added again. An answer should end with a special token that counts in the
loss: otherwise the model does not learn to stop.
"""

import dataclasses
from typing import Any

import numpy as np

from zerojax.data.chat import Template

_PROBE = "An answer."


@dataclasses.dataclass(frozen=True)
class Tokenized:
    """A tokenized text.

    Attributes:
      text: text that was tokenized.
      tokens: i32[n], token ids.
      starts: i64[n], index of each token's first character.
      ends: i64[n], index after each token's last character; tokens added by the tokenizer have
        [0, 0).
    """

    text: str
    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def is_blank(self, i: int) -> bool:
        """Return whether token `i` is white space."""
        return self.text[self.starts[i] : self.ends[i]].isspace()

    def in_span(self, start: int, end: int) -> np.ndarray:
        """Return which tokens overlap [start, end) of the text, bool[n]."""
        return (self.starts < self.ends) & (self.starts < end) & (self.ends > start)

    def last_visible(self, stop: int) -> int:
        """Return the index of the last token before `stop` that is not white space, or -1."""
        i = stop - 1
        while i >= 0 and self.is_blank(i):
            i -= 1
        return i


class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
      ids: set of the ids of all special tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Collect the special tokens of a tokenizer of transformers."""
        added = tokenizer.added_tokens_decoder.items()
        self._tokenizer = tokenizer
        self.ids = {*tokenizer.all_special_ids, *(token for token, kind in added if kind.special)}

    def tokenized(self, text: str, add_special_tokens: bool) -> Tokenized:
        """Return a tokenized text.

        With `add_special_tokens`, the tokenizer's special tokens are added unless the text already
        has them.
        """
        out = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        starts, ends = np.asarray(out["offset_mapping"], np.int64).reshape(-1, 2).T
        tokenized = Tokenized(text, np.asarray(out["input_ids"], np.int32), starts, ends)
        if not add_special_tokens:
            return tokenized
        chosen = _added_once(tokenized, np.asarray(out["special_tokens_mask"], bool))
        return Tokenized(text, tokenized.tokens[chosen], starts[chosen], ends[chosen])

    def stop_after(self, tokenized: Tokenized, first: int, stop: int) -> int | None:
        """Return the end of an answer's tokens, including the special token that ends the answer.

        Args:
          tokenized: tokenized conversation.
          first: index of the first token that the template writes for the answer.
          stop: index after the last token that the template writes for the answer.

        Returns:
          The index after the special token, or None if no special token ends the answer.
        """
        last = tokenized.last_visible(stop)
        if last >= first and int(tokenized.tokens[last]) in self.ids:
            return stop
        after = stop
        count = len(tokenized.tokens)
        while after < count and tokenized.is_blank(after):
            after += 1
        return after + 1 if after < count and int(tokenized.tokens[after]) in self.ids else None

    def turn_end(self, template: Template) -> int | None:
        """Return the special token that ends an answer in a chat template, or None."""
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
    """Return the range of tokens to keep.

    Tokens that the tokenizer added at an edge are left out if the text itself has them there.
    """
    inner = np.flatnonzero(~is_added)
    tokens = tokenized.tokens
    count = len(is_added)
    if not inner.size:
        return slice(None)
    head = int(inner[0])
    stop = int(inner[-1]) + 1
    tail = tokens[stop:]
    last = tokenized.last_visible(stop) + 1
    begins_with_it = np.array_equal(tokens[:head], tokens[head : min(2 * head, stop)])
    ends_with_it = np.array_equal(tail, tokens[max(head, last - len(tail)) : last])
    return slice(head if begins_with_it else 0, stop if ends_with_it else count)

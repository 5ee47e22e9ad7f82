"""Text as its tokens are drawn: whole characters, up to a stop text, several texts in order."""

import codecs
from collections.abc import Sequence

import tiktoken


class TextStream:
    """Tokens in, text out: only whole UTF-8 characters, and nothing from a stop text on.

    >>> stream = TextStream(stop=["END"])
    >>> stream.feed(b"caf\\xc3"), stream.feed(b"\\xa9 E"), stream.feed(b"ND!"), stream.ended
    ('caf', 'é ', '', True)
    """

    def __init__(self, stop=()):
        self.stop, self.ended = stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # text that a stop text may begin with

    def feed(self, raw: bytes, final: bool = False) -> str:
        """The text that is certain after these bytes; with `final`, all that is left."""
        if self.ended:
            return ""
        text = self.held + self.decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.ended = final or bool(ends)
        if self.ended:
            return text[: min(ends, default=None)]
        prefixes = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


class Sample(TextStream):
    """One text of a batch: the ids of its tokens, and what of it is not printed yet."""

    def __init__(self, prompt: str, ids: Sequence[int], stop: Sequence[str] = ()):
        super().__init__(stop)
        self.ids, self.n_prompt, self.unprinted = list(ids), len(ids), prompt

    def add(self, token: int, encoding: tiktoken.Encoding):
        """The next token; nothing after the end."""
        if not self.ended:
            self.ids.append(token)
            end = token in encoding._special_tokens.values()
            raw = b"" if end else encoding.decode_single_token_bytes(token)
            self.unprinted += self.feed(raw, final=end)


def print_in_order(samples: list[Sample], current: int) -> int:
    """Print what is new of sample number `current` and, where it has ended, of those after it;
    returns the number of the first that has not."""
    while True:
        print(samples[current].unprinted, end="", flush=True)
        samples[current].unprinted = ""
        if not samples[current].ended or current == len(samples) - 1:
            return current
        print("\n---")
        current += 1

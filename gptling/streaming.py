"""Text as its tokens are drawn: whole characters, up to a stop text, several texts in order."""

import codecs
import sys
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
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that a stop text may begin with

    def feed(self, raw: bytes, final: bool = False) -> str:
        """The text that is certain after these bytes; with `final`, all that is left."""
        if self.ended:
            return ""
        text = self._held + self._decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.ended = final or bool(ends)
        if self.ended:
            return text[: min(ends, default=None)]
        prefixes = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class Sample:
    """One text of a batch: the ids of its tokens, and what of it is not printed yet."""

    def __init__(self, prompt: str, ids: Sequence[int], stop: Sequence[str] = ()):
        self.ids, self.n_prompt, self.unprinted = list(ids), len(ids), prompt
        self.stream = TextStream(stop)

    @property
    def ended(self) -> bool:
        return self.stream.ended

    def add(self, token: int, encoding: tiktoken.Encoding):
        """The next token; nothing after the end."""
        if self.ended:
            return
        self.ids.append(token)
        end_of_text = token in encoding._special_tokens.values()
        raw = b"" if end_of_text else encoding.decode_single_token_bytes(token)
        self.unprinted += self.stream.feed(raw, final=end_of_text)

    def end(self):
        """No token follows."""
        self.unprinted += self.stream.feed(b"", final=True)


def print_in_order(samples: list[Sample], current: int) -> int:
    """Print what is new of sample number `current` and, where it has ended, of those after it up to
    the first that has not; returns the number of that one."""
    while True:
        sys.stdout.write(samples[current].unprinted)
        samples[current].unprinted = ""
        if not samples[current].ended or current == len(samples) - 1:
            break
        sys.stdout.write("\n---\n")
        current += 1
    sys.stdout.flush()
    return current

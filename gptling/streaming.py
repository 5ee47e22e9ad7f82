"""Text as its tokens are drawn: whole characters, up to a stop text, several texts in order."""

import codecs
from collections.abc import Sequence

import tiktoken


class Sample:
    """A text: the ids of its tokens, and what of it is not printed yet, which is whole characters
    and nothing from a stop text on."""

    def __init__(self, prompt: str, ids: Sequence[int], stop: Sequence[str] = ()):
        self.ids, self.n_prompt, self.unprinted = list(ids), len(ids), prompt
        self.stop, self.ended = stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # text that a stop text may begin with

    def add(self, token: int, tokenizer: tiktoken.Encoding):
        """Add the next token. A special token ends the text."""
        if not self.ended:
            self.ids.append(token)
            end = token in tokenizer._special_tokens.values()
            self.feed(b"" if end else tokenizer.decode_single_token_bytes(token), final=end)

    def feed(self, raw: bytes, final: bool = False):
        """Add the next bytes, all that there are if `final`. Nothing follows the end."""
        if self.ended:
            return
        text = self.held + self.decoder.decode(raw, final)
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self.ended = final or bool(ends)
        certain = min(ends, default=len(text))
        if not self.ended:
            prefixes = (stop[:n] for stop in self.stop for n in range(1, len(stop)))
            certain -= max((len(p) for p in prefixes if text.endswith(p)), default=0)
        self.unprinted += text[:certain]
        self.held = text[certain:]


def print_in_order(waiting: list[Sample]):
    """Print what is new of the first sample. If it has ended, take it and print the one after."""
    while waiting:
        print(waiting[0].unprinted, end="", flush=True)
        waiting[0].unprinted = ""
        if not waiting[0].ended:
            return
        del waiting[0]
        print("\n---" if waiting else "", flush=True)

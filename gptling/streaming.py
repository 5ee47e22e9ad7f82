"""Text as its tokens are drawn: whole characters, up to a stop text, several texts in order."""

import codecs


class Sample:
    """A text as it is drawn. `unprinted` has whole characters, and nothing from a stop text on."""

    def __init__(self, prompt: str, ids: list[int], stop: tuple[str, ...] = ()):
        self.ids, self.n_prompt, self.unprinted = list(ids), len(ids), prompt
        self.stop, self.ended = stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # the last characters, with which a stop text may begin

    def add(self, token: int, tokenizer):
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
        n_held = 0 if final else min(len(text), max(map(len, self.stop), default=1) - 1)
        end = min(ends, default=len(text) - n_held)
        self.unprinted += text[:end]
        self.held = text[end:]


def print_in_order(waiting: list[Sample]):
    """Print what is new of the first sample. If it has ended, take it and print the one after."""
    while waiting:
        print(waiting[0].unprinted, end="", flush=True)
        waiting[0].unprinted = ""
        if not waiting[0].ended:
            return
        del waiting[0]
        print("\n---" if waiting else "", flush=True)

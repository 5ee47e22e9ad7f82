"""tokenizer.json: a tiktoken.Encoding as Hugging Face's tokenizers read and write it.

The format: https://huggingface.co/docs/tokenizers
"""

import itertools
import json
import math
import re
from pathlib import Path

import tiktoken

from gptling.cli import UserError
from gptling.files import read_json

END_OF_TEXT = "<|endoftext|>"
MAX_JSON = 1 << 26  # bytes of a tokenizer.json, which has about 40 a token
MAX_PATTERN = 1 << 18  # characters of the pattern and the special tokens: they are compiled
ANY_CHARACTER = r"[\s\S]"  # the pattern of char and byte; Hugging Face's engine refuses (?s:.)
# GPT-2's published tokenizer.json leaves its pattern out: ByteLevel with use_regex stands for it.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# GPT-4's (tiktoken's cl100k_base).
BPE_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# ByteLevel's printable letter for each byte, which vocabularies are written in: the byte's own
# Latin-1 character if that is visible, otherwise the next one from 256 on.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTE_TO_LETTER = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
LETTER_TO_BYTE = {letter: byte for byte, letter in BYTE_TO_LETTER.items()}
TOKENIZER_JSON = """{
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
    ]},
    "post_processor": null,
    "decoder": {
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    },
    "model": {
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
        "ignore_merges": true, "vocab": {}, "merges": []
    }
}"""  # ignore_merges as in tiktoken: a piece of text that is a token is that token


def has_all_bytes(encoding: tiktoken.Encoding) -> bool:
    """Whether a tokenizer can encode every text."""
    return all(bytes([byte]) in encoding._mergeable_ranks for byte in range(256))


def tokenizer_to_json(encoding: tiktoken.Encoding) -> str:
    """The text of a tokenizer.json that Hugging Face's tokenizers and load_tokenizer read alike.

    Raises UserError for a tokenizer that cannot be expressed there."""
    if encoding._pat_str != ANY_CHARACTER and not has_all_bytes(encoding):
        raise UserError(f"tokenizer {encoding.name!r}: only one of characters may lack bytes")
    ranks = encoding._mergeable_ranks
    letters = {token: token.decode("latin-1").translate(BYTE_TO_LETTER) for token in ranks}
    tokenizer = json.loads(TOKENIZER_JSON)
    tokenizer["added_tokens"] = [
        {"id": id, "content": content, "special": True}
        | dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        for content, id in sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    ]
    # {1,3}+ is possessive for tiktoken and a repetition for Hugging Face's engine. Nothing follows
    # it in an alternative, so that without the + both mean the same.
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", encoding._pat_str)
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    tokenizer["model"]["vocab"] = {letters[token]: rank for token, rank in ranks.items()}
    parts = (_last_parts(ranks, token) for token in sorted(ranks, key=ranks.get))
    pairs = ([letters.get(part) for part in last] for last in parts if len(last) == 2)
    tokenizer["model"]["merges"] = [pair for pair in pairs if None not in pair]
    return json.dumps(tokenizer, ensure_ascii=False)


def _last_parts(ranks, token):
    """The parts of `token` when all other merges are done, lowest rank first: where they are two,
    theirs is the one merge by which tiktoken ever arrives at the token, whatever is around it, for
    merges in a part of a text that ends as one token are those of that part alone."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, math.inf) for a, b in itertools.pairwise(parts)]
        lowest = min(pairs)
        if lowest == math.inf:
            break
        i = pairs.index(lowest)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def load_tokenizer(path: str | Path) -> tiktoken.Encoding:
    """The tokenizer of a data or checkpoint directory; GPT-2's own tokenizer.json is read too, and
    its vocab.json with merges.txt where that is missing.

    Raises UserError where there is none, or one that is not a byte-level BPE or takes more memory
    than its size allows for."""
    file = Path(path) / "tokenizer.json"
    published = not file.exists() and file.with_name("vocab.json").exists()
    file = file.with_name("vocab.json") if published else file
    name, stored = file.parent.name, read_json(file, MAX_JSON)
    try:
        if published:
            lines = file.with_name("merges.txt").read_text(encoding="utf-8").split("\n")
            merges = [line for line in lines if line and not line.startswith("#version")]
            special = {token: id for token, id in stored.items() if token == END_OF_TEXT}
            return _checked_encoding(name, GPT2_PATTERN, special, stored, merges)
        pattern, model = _split_pattern(stored["pre_tokenizer"]), stored["model"]
        special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        return _checked_encoding(name, pattern, special, model["vocab"], model["merges"])
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        words = f"not a byte-level BPE as prepare.py writes it ({error!r:.200})"
        raise UserError(f"{file}: {words}") from None


def _split_pattern(pre_tokenizer):
    if pre_tokenizer["type"] == "ByteLevel" and not pre_tokenizer["add_prefix_space"]:
        return GPT2_PATTERN
    split, byte_level = pre_tokenizer["pretokenizers"]
    types = split["type"], byte_level["type"], byte_level["use_regex"]
    if types != ("Split", "ByteLevel", False):
        raise ValueError("its pre_tokenizer is another")
    return split["pattern"]["Regex"]


def _checked_encoding(name, pattern, special, vocab, merges):
    ranks = {
        bytes(LETTER_TO_BYTE[letter] for letter in token): id
        for token, id in vocab.items()
        if token not in special
    }
    merges = [merge.split(" ") if type(merge) is str else merge for merge in merges]
    order = [vocab[a + b] for a, b in merges]
    if order != sorted(order):
        raise ValueError("ids that are not in the order of the merges")
    ids = [*ranks.values(), *special.values()]
    limit = 2 * len(ids) + 1024  # tables have a row for each id, so that gaps take memory
    if len(set(ids)) < len(ids) or not all(type(id) is int and 0 <= id < limit for id in ids):
        raise ValueError(f"ids that are not unique, or not from 0 to {limit - 1}")
    if len(pattern) + sum(map(len, special)) > MAX_PATTERN:
        raise ValueError("its pattern and special tokens are too long")
    safe = _whole_pattern(pattern)
    encoding = tiktoken.Encoding(name, pat_str=safe, mergeable_ranks=ranks, special_tokens=special)
    encoding._pat_str, encoding.engine_pattern = pattern, safe
    if pattern != ANY_CHARACTER and not has_all_bytes(encoding):
        raise ValueError("it lacks bytes, which only a tokenizer of characters may")
    return encoding


def _whole_pattern(pattern):
    """`pattern` such that each match begins where the last one ended (\\G) and is not empty, for
    tiktoken aborts at an empty one and leaves out what is between two. Raises ValueError."""
    if pattern in (ANY_CHARACTER, GPT2_PATTERN, BPE_PATTERN):
        return pattern
    tiktoken.Encoding("", pat_str=pattern, mergeable_ranks={b"a": 0}, special_tokens={})
    if r"\K" in pattern:  # moves the beginning of a match
        raise ValueError("its pattern has \\K")
    return rf"\G(?:{pattern})(?!\G)|[\s\S]"


def copy_tokenizer(encoding: tiktoken.Encoding) -> tiktoken.Encoding:
    """The same tokenizer for another thread: one that two have used is a quarter slower."""
    return tiktoken.Encoding(
        encoding.name,
        pat_str=getattr(encoding, "engine_pattern", encoding._pat_str),
        mergeable_ranks=encoding._mergeable_ranks,
        special_tokens=encoding._special_tokens,
    )

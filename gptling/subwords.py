"""Subword regularisation: in each pass over a short text, its words are other tokens.
Provilkov et al. 2020, BPE-dropout, https://arxiv.org/abs/1910.13267"""

import math
import random
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import regex
import tiktoken

from gptling.files import UserError
from gptling.tokenizers import encode

PASSES = 16  # copies of the text, each with other tokens
FEWEST, MOST = 8, 256  # limits of the number of splits of a word, one for each of its occurrences
LONGEST = 64  # bytes of the longest word that is split
MOST_TOKENS = 10_000_000  # limit of the text: so many need minutes and a gigabyte


def find_words(text: str, tokenizer: tiktoken.Encoding) -> list[str]:
    """Return the words of a text, which tokens never cross, and the special tokens in it."""
    special = tokenizer.special_tokens_set
    pattern = "|".join(map(regex.escape, special)) or "(?!)"  # which is nowhere
    words = []
    for part in regex.split(f"({pattern})", text):
        if part in special:
            words.append(part)
        else:
            words += [match[0] for match in regex.finditer(tokenizer._pat_str, part)]
    return words


def split_word(word: str, tokenizer: tiktoken.Encoding, dropout: float, rng: random.Random):
    """Return the tokens of a word. Byte-pair encoding merges the two neighbours whose merged token
    is the lowest, again and again. Here each step overlooks a share `dropout` of neighbours."""
    ranks = tokenizer._mergeable_ranks
    tokens = [bytes([byte]) for byte in word.encode()]
    while True:
        lowest = math.inf
        for i, (left, right) in enumerate(pairwise(tokens)):
            rank = ranks.get(left + right, math.inf)
            if rank < lowest and rng.random() >= dropout:  # others draw no number
                lowest = rank
                place = i
                merged = left + right
        if lowest == math.inf:
            return [ranks[token] for token in tokens]
        tokens[place : place + 2] = [merged]


def draw_splits(word: str, count: int, tokenizer: tiktoken.Encoding, dropout: float, rng):
    """Return a list of splits of a word, which occurs `count` times in the text."""
    if word in tokenizer.special_tokens_set or len(word.encode()) > LONGEST:
        return [encode(tokenizer, word, tokenizer.special_tokens_set).tolist()]
    n = min(max(count, FEWEST), MOST)
    return [split_word(word, tokenizer, dropout, rng) for _ in range(n)]


def vary_tokens(shards: list, tokenizer: tiktoken.Encoding, dropout: float, seed: int) -> list:
    """Return the training tokens PASSES times, an array each, with words split at random:
    "resolved" is resol|ved, res|olved, re|sol|ved and so on. dropout: see split_word. Raises
    UserError for more than MOST_TOKENS."""
    ids = np.concatenate(shards).tolist()
    if len(ids) > MOST_TOKENS:
        raise UserError(
            f"--bpe_dropout={dropout}: the text has {len(ids):,} tokens, "
            f"more than {MOST_TOKENS:,}: give --bpe_dropout=0"
        )
    words = find_words(tokenizer.decode_bytes(ids).decode(errors="ignore"), tokenizer)
    rng = random.Random(seed)
    splits = {
        word: draw_splits(word, count, tokenizer, dropout, rng)
        for word, count in Counter(words).items()
    }
    passes = []
    for _ in range(PASSES):
        drawn = (rng.choice(splits[word]) for word in words)
        passes.append(np.fromiter(chain.from_iterable(drawn), shards[0].dtype))
    return passes

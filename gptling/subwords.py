"""Subword regularisation: in each pass over a short text, its words are other tokens.
Provilkov et al. 2020, BPE-dropout, https://arxiv.org/abs/1910.13267"""

from itertools import chain

import numpy as np
import regex  # tiktoken requires it
import tiktoken

from gptling.tokenizers import find_merges

PASSES = 16  # copies of the text, each with other tokens
FEWEST, MOST = 8, 256  # splits of a word: as many as its occurrences, within these limits
LONGEST = 64  # bytes of a word that is split. Longer ones keep their tokens


def find_words(text: str, tokenizer: tiktoken.Encoding) -> list[str]:
    """Return the words of a text, which tokens never cross, and the special tokens in it."""
    special = [regex.escape(token) for token in tokenizer.special_tokens_set]
    parts = regex.split(f"({'|'.join(special)})", text) if special else [text]
    words = []
    for part in parts:
        if part in tokenizer.special_tokens_set:
            words.append(part)
        else:
            words += [match[0] for match in regex.finditer(tokenizer._pat_str, part)]
    return words


def spell(word: str, tokenizer: tiktoken.Encoding) -> list[int] | None:
    """Return a word's bytes as tokens, or None for a long one or a special token."""
    ids = [tokenizer._mergeable_ranks.get(bytes([byte])) for byte in word.encode()]
    if len(ids) > LONGEST or None in ids or word in tokenizer.special_tokens_set:
        return None
    return ids


def number_merges(tokenizer: tiktoken.Encoding) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of tokens that together are a token, as sorted numbers a * n_vocab + b, and
    that token ab of each."""
    ranks = tokenizer._mergeable_ranks
    merges = {}
    for a, b in find_merges(tokenizer):
        pair = ranks[a] * tokenizer.n_vocab + ranks[b]
        merges[pair] = ranks[a + b]
    pairs = sorted(merges)
    return np.array(pairs), np.array([merges[pair] for pair in pairs])


def split_words(words: list[list[int]], merges: tuple, n_vocab: int, dropout: float, rng) -> list:
    """Return the tokens of each word, given those of its bytes. Byte-pair encoding merges the pair
    with the lowest token, again and again. Here each step overlooks a share `dropout` of pairs."""
    pairs, merged = merges
    if not len(pairs):
        return words
    longest = max(map(len, words))
    tokens = np.full((len(words), longest + 1), -1)  # a row for each word
    for row, word in enumerate(words):
        tokens[row, : len(word)] = word
    unfinished = np.arange(len(words))
    while len(unfinished):
        now = tokens[unfinished]
        pair = now[:, :-1] * n_vocab + now[:, 1:]
        found = np.searchsorted(pairs, pair).clip(max=len(pairs) - 1)
        possible = (pairs[found] == pair) & (now[:, 1:] >= 0)
        possible &= rng.random(pair.shape) >= dropout
        some = possible.any(axis=1)
        unfinished = unfinished[some]
        now = now[some]
        ids = np.where(possible, merged[found], n_vocab)[some]
        best = ids.argmin(axis=1)  # the place of the pair
        after = np.arange(longest) > best[:, None]  # moves up by one token
        now[:, :-1] = np.where(after, now[:, 1:], now[:, :-1])
        now[np.arange(len(now)), best] = ids.min(axis=1)
        now[:, -1] = -1
        tokens[unfinished] = now
    return [row[row >= 0] for row in tokens]


def draw_splits(
    words: list[str], counts, tokenizer: tiktoken.Encoding, dropout: float, rng
) -> list:
    """Return a list of splits for each word, which occurs so often in the text."""
    splits = []
    todo = []  # (number of a word, its letters)
    for number, (word, count) in enumerate(zip(words, counts, strict=True)):
        letters = spell(word, tokenizer)
        if letters:
            splits.append([])
            todo += min(max(count, FEWEST), MOST) * [(number, letters)]
        else:
            usual = tokenizer.encode(word, allowed_special="all")
            splits.append([usual])
    merges = number_merges(tokenizer)
    for i in range(0, len(todo), 1 << 15):  # some at a time need less memory
        numbers, spelled = zip(*todo[i : i + (1 << 15)], strict=True)
        drawn = split_words(spelled, merges, tokenizer.n_vocab, dropout, rng)
        for number, split in zip(numbers, drawn, strict=True):
            splits[number].append(split)
    return splits


def vary_tokens(shards: list, tokenizer: tiktoken.Encoding, dropout: float, seed: int) -> list:
    """Return the training tokens PASSES times, an array each, with words split at random:
    "resolved" is resol|ved, res|olved, re|sol|ved and so on. dropout: see split_words."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate(shards).tolist()
    words = find_words(tokenizer.decode_bytes(ids).decode(errors="ignore"), tokenizer)
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    text = np.array([numbers[word] for word in words])
    splits = draw_splits(list(numbers), np.bincount(text), tokenizer, dropout, rng)
    n_splits = np.array([len(of_a_word) for of_a_word in splits])
    first_split = np.cumsum(n_splits) - n_splits
    splits = list(chain.from_iterable(splits))
    flat = np.concatenate(splits).astype(shards[0].dtype)
    lengths = np.array([len(split) for split in splits])
    starts = np.cumsum(lengths) - lengths
    passes = []
    for _ in range(PASSES):
        chosen = first_split[text] + rng.integers(n_splits[text])
        n = lengths[chosen]
        places = np.cumsum(n) - n  # of each word in this pass
        moves = np.repeat(starts[chosen] - places, n)
        in_flat = np.arange(len(moves)) + moves
        passes.append(flat[in_flat])
    return passes

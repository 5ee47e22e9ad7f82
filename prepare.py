"""Text to token ids.

    python prepare.py                            # the source of Python's standard library
    python prepare.py https://example.org/a.txt  # a URL, or the word shakespeare
    python prepare.py my.txt notes/ chat.jsonl.gz --tokenizer bpe --vocab_size 4096 --name mine
    python prepare.py hf:HuggingFaceFW/fineweb-edu:sample-10BT:train --tokenizer gpt2

Output: data/NAME/ with train-00000.npy ..., val.npy (token ids), tokenizer.json and meta.json. A
document is a file or a record, or the text between two <|endoftext|> in a file. In the output, the
end-of-text token separates documents. Equal documents are used once. The directory appears whole or
not at all.
"""

import glob
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import tyro

from gptling import tokenizers
from gptling.cli import Empty, UserError, check_numbers, launch, load_config
from gptling.corpus import Corpus, encode_on_all_cores, write_token_files
from gptling.files import new_directory
from gptling.sources import QUICKSTART, name_after

# What --overwrite may delete, and macOS' own.
OUTPUT = re.compile(r"(train-\d+|val)\.npy|(tokenizer|meta)\.json|\.DS_Store")


@dataclass
class PrepareConfig:
    # files, folders, URLs, hf:NAME:CONFIG:SPLIT, or shakespeare. Default: Python's standard library
    sources: tyro.conf.Positional[Empty[tuple[str, ...]]] = (QUICKSTART,)
    encoding: Empty[str] = ""  # encoding of text files that are not in UTF-8, such as cp1252
    field: str = "text"  # the field of records (.jsonl, .parquet, hf:) that holds the text
    tokenizer: str = "auto"  # auto, char, byte, bpe, a tiktoken name (gpt2), or a run's directory
    vocab_size: int = 0  # number of tokens of a bpe, with end-of-text. 0: 4096, or auto's choice
    name: Empty[str] = ""  # directory under data/. Default: the first source's name
    overwrite: bool = False  # replace data/NAME if it exists

    def __post_init__(self):
        check_numbers(self)
        self.name = self.name or name_after(self.sources[0])
        if Path(self.name).name != self.name or self.name in ("", ".."):
            raise ValueError(f"--name {self.name!r}: give a plain name, for a directory in data/")


def load_tokenizer(name: str | Path) -> tiktoken.Encoding:
    """The tokenizer of prepared data, a run, a checkpoint or a hub's GPT-2. Raises UserError."""
    directory = Path(name).expanduser()
    if not (directory / "tokenizer.json").exists():
        from gptling.pretrained import find_checkpoint  # imports PyTorch, which takes seconds

        directory = find_checkpoint(name)
    return tokenizers.load_tokenizer(directory)


def make_tokenizer(corpus: Corpus, kind: str, vocab_size: int) -> tiktoken.Encoding:
    """The tokenizer called `kind`, made from training text alone. The exception is "char", also for
    "auto" and a short text: it has all characters of the corpus. Raises UserError."""
    if kind not in tokenizers.TOKENIZERS and Path(kind).expanduser().is_dir():
        return tokenizers.check_size(load_tokenizer(kind), vocab_size)
    if kind == "auto" and not vocab_size and corpus.n_train.sum() < tokenizers.AUTO_CHAR_BYTES:
        kind = "char"
    texts = (text for split, text in corpus.texts() if split == "train" or kind == "char")
    return tokenizers.build_tokenizer(kind, texts, vocab_size, corpus.n_documents > 1)


def print_summary(target: Path, meta: dict, corpus: Corpus, is_auto: bool):
    """Print what the data are, and what is missing. A large part is a warning before all else."""
    share = corpus.n_lost / (corpus.n_lost + meta["bytes"])
    if share > 0.01:
        print(f"prepare.py: warning: {share:.0%} of the bytes could not be read", file=sys.stderr)
    how = ", chosen for this text (change with --tokenizer)" if is_auto else ""
    print(f"{target}\n  documents: {meta['documents']:,}, bytes: {meta['bytes']:,}")
    print(f"  tokenizer: {meta['tokenizer']}, {meta['vocab_size']:,} tokens{how}")
    print(f"  {meta['train']['tokens']:,} tokens to train on", end=", ")
    print(f"{meta['val']['tokens']:,} to validate on")
    for note in corpus.notes():
        print(f"  {note}")


def prepare(config: PrepareConfig | None = None) -> Path:
    """Write data/NAME/, or data/quickstart without a config. Return it. Raises UserError."""
    config = config or PrepareConfig()
    target = Path("data") / config.name
    if target.exists() and any(target.iterdir()) and not config.overwrite:
        raise UserError(f"{target} already exists: use --overwrite, or choose another --name")
    for path in target.glob("*"):
        if not OUTPUT.fullmatch(path.name):
            raise UserError(f"{path} would be deleted: choose another --name")
    for path in target.resolve().parent.glob(f".{glob.escape(target.resolve().name)}.????????"):
        print(f"delete {path} unless a prepare.py is writing it")
    with new_directory(target) as directory:
        corpus = Corpus(config.sources, directory.parent, config.field, config.encoding)
        tokenizer = make_tokenizer(corpus, config.tokenizer, config.vocab_size)
        name = tokenizer.name if config.tokenizer == "auto" else config.tokenizer
        tokenizer = tokenizers.save_tokenizer(tokenizer, directory)  # read back as training does
        encoded = encode_on_all_cores(tokenizer, corpus.texts())
        n_tokens, fingerprint = write_token_files(directory, tokenizer, encoded)
        if min(n_tokens["train"], n_tokens["val"]) < 2:  # an input and its target
            raise UserError("; ".join([f"{target}: give more text", *corpus.refused[:5]]))
        meta = {
            "format": 1,
            "tokenizer": name,
            "vocab_size": tokenizer.n_vocab,
            "documents": corpus.n_documents,
            "bytes": int(corpus.sizes.sum()),
            "train": {"tokens": n_tokens["train"]},
            "val": {"tokens": n_tokens["val"]},
            "sha256": fingerprint,  # the hash of all token ids
        }
        (directory / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print_summary(target, meta, corpus, config.tokenizer == "auto")
    return target


def main():
    config, _ = load_config(PrepareConfig, __doc__)
    target = prepare(config)
    print(f"next: python train.py --dataset={shlex.quote(target.name)}")


if __name__ == "__main__":
    launch(main)

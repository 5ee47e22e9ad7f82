"""Text to token ids.

    python prepare.py                            # the language reference that ships with Python
    python prepare.py shakespeare                # a named download, checked by its sha256
    python prepare.py my.txt notes/ chat.jsonl.gz --tokenizer bpe --vocab_size 4096 --name mine
    python prepare.py hf:HuggingFaceFW/fineweb-edu:sample-10BT:train --tokenizer gpt2

writes data/NAME/: train-00000.npy ..., val.npy (token ids), tokenizer.json and meta.json. Documents
are separated by the end-of-text token. The directory appears whole or not at all; what was stopped
goes on at the last finished shard with the same command, from data/.NAME.partial.
"""

import contextlib
import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from gptling.cli import UserError, load, run
from gptling.corpus import check_sources, find_sources, read, source_id
from gptling.files import is_plain_name, lock_directory, replace, writing
from gptling.shards import (
    CorpusPosition,
    TokenShards,
    encode_on_all_cores,
    learn_tokenizer,
    split_documents,
)
from gptling.tokenizers import check_vocab_size, load_tokenizer, tokenizer_to_json


@dataclass
class PrepareConfig:
    # files, folders, hf:NAME:CONFIG:SPLIT; shakespeare; or nothing
    sources: tyro.conf.Positional[tuple[str, ...]] = ()
    tokenizer: str = "auto"  # by the text; or char, byte, bpe, one of tiktoken's (gpt2), a run's
    vocab_size: int = 0  # of a bpe, end-of-text among them; 0 for 4096, or as auto chooses
    name: str = ""  # the directory under data/; otherwise called after the first source
    overwrite: bool = False  # replace data/NAME if it is there

    def __post_init__(self):
        name = self.name or name_after(self.sources)
        if not is_plain_name(name):
            raise ValueError(f"--name {name!r}: give a plain name, for a directory in data/")
        check_vocab_size(self.tokenizer, self.vocab_size)


def name_after(sources: tuple[str, ...]) -> str:
    """The name of a data directory: that of its first source, without the ending."""
    first = sources[0] if sources else "quickstart"
    first = first.split(":")[1] if first.startswith("hf:") else first
    endings = r"(?i)\.(txt|md|text|jsonl|jsonl\.gz|parquet)$"
    return re.sub(endings, "", Path(first).resolve().name.strip("."))


@contextlib.contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """A locked directory beside `target`, in which it is made. It is kept where progress.json says
    that something is finished in it."""
    directory = target.with_name(f".{target.name}.partial")
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(directory)
    try:
        yield directory
    finally:
        lock.release()
        if (directory / "data").exists() and (directory / "progress.json").exists():
            print(f"{directory} is kept: the same command goes on from there")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def prepare(config: PrepareConfig) -> Path:
    """Write data/NAME/ as `config` says and return it. Raises UserError."""
    target = Path("data") / (config.name or name_after(config.sources))
    if target.exists() and any(target.iterdir()) and not config.overwrite:
        raise UserError(f"{target} is there: --overwrite=True replaces it, --name keeps both")
    with partial_directory(target) as directory:
        output, progress_file = directory / "data", directory / "progress.json"

        # ------------------------------------------------ documents, and how far they were read
        sources = find_sources(config.sources, downloads=directory)
        check_sources(sources, target)
        wanted = [config.tokenizer, config.vocab_size, *map(source_id, sources)]
        progress = json.loads(progress_file.read_text()) if progress_file.exists() else {}
        if progress.get("wanted") != wanted or not output.exists():
            progress = {}
            progress_file.unlink(missing_ok=True)
            shutil.rmtree(output, ignore_errors=True)
        position = CorpusPosition(**progress.get("place", {}))
        first_sizes = [size for _, (size, _) in itertools.islice(read(sources), 10)]

        # ------------------------------------------------ tokenizer
        if progress:
            print(f"going on behind {position.count['characters']:,} characters")
            tokenizer = load_tokenizer(output)
        else:
            tokenizer = learn_tokenizer(config.tokenizer, config.vocab_size, sources, first_sizes)
            with writing(output):
                output.mkdir()
                replace(output / "tokenizer.json", tokenizer_to_json(tokenizer).encode())

        # ------------------------------------------------ encode and write
        keyed = ((piece, piece[-1]) for piece in split_documents(sources, first_sizes, position))
        with writing(output):
            shards = TokenShards(output, tokenizer, **progress.get("shards", {}))
            for (position, split, text), ids in encode_on_all_cores(tokenizer, keyed):
                shards.write(split, ids if text else shards.separator)
                if shards.is_full():
                    state = {"place": asdict(position), "shards": shards.finish_shard()}
                    replace(progress_file, json.dumps({"wanted": wanted} | state).encode())
            fingerprint = shards.close()

        # ------------------------------------------------ meta.json, and the name
        count, train = position.count, [length for length, _ in shards.finished]
        longest = min(max(train), shards.val.length) - 1  # sequence that both splits have
        if longest < 1:
            few = f"{count['characters']} characters are too few to train and validate on"
            raise UserError(f"{target}: {few}: give more text")
        meta = {
            "format": 1,
            "tokenizer": tokenizer.name if config.tokenizer == "auto" else config.tokenizer,
            "vocab_size": tokenizer.n_vocab,
            "documents": count["documents"],
            "characters": count["characters"],
            "train": {"tokens": sum(train), "bytes": count["train"], "shards": len(train)},
            "val": {"tokens": shards.val.length, "bytes": count["val"]},
            "sha256": fingerprint,  # of the token files
        }
        with writing(target):
            replace(output / "meta.json", json.dumps(meta, indent=2).encode() + b"\n")
            if target.exists():
                target.rename(directory / "replaced")
            output.rename(target)

    chosen = config.tokenizer == "auto" and not config.vocab_size
    by_the_text = " (by the text; or give --tokenizer)" if chosen else ""
    print(
        f"{target}: {count['documents']:,} document{'s' * (count['documents'] != 1)}, "
        f"{count['characters']:,} characters; "
        f"tokenizer {meta['tokenizer']} with {tokenizer.n_vocab:,} tokens{by_the_text}; "
        f"{sum(train):,} tokens to train on, {shards.val.length:,} to validate"
    )
    return target


def main():
    target = prepare(load(PrepareConfig, __doc__)[0])
    flags = "" if target.name == "quickstart" else f" --dataset={shlex.quote(target.name)}"
    print(f"next: python train.py{flags}")


if __name__ == "__main__":
    run(main)

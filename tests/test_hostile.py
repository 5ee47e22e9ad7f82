"""Files and flags of a stranger: no code runs, no memory is lost, no character either."""

import ast
import contextlib
import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gptling.cli import UserError, load, read_preset
from gptling.dataset import read_meta
from gptling.gpt2_format import save
from gptling.pretrained import find_checkpoint, load_model
from gptling.tokenizers import build_tokenizer, encode, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig, next_token_probs
from prepare import PrepareConfig
from sample import SampleConfig
from tests.benchmarks.report import peak_megabytes
from tests.conftest import ROOT, run_here
from train import TrainConfig

# The same examples in every run; where one takes long, most of them in a slow test of its own.
properties = settings(derandomize=True, deadline=None, database=None, max_examples=100)
few = settings(properties, max_examples=40)
many = settings(properties, max_examples=200)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # no surrogates: UTF-8 has none


# ---------------------------------------------------------------- properties


KINDS = [PrepareConfig, SampleConfig, TrainConfig]
NAMES = sorted({name for cls in KINDS for name in cls.__dataclass_fields__})
VALUES = st.one_of(
    st.integers().map(str),
    st.integers(min_value=0, max_value=400).map(lambda n: "-" * (n % 2) + "1" + "0" * n),
    st.floats().map(str),
    st.sampled_from(["true", "False", "auto", "", "-", "--", "=", "1e400", "0x10", "'", "\x1b[0m"]),
    ANY_TEXT,
)
FLAGS = st.tuples(st.sampled_from(NAMES), VALUES).map(lambda pair: f"--{pair[0]}={pair[1]}")
TOML = st.tuples(
    st.sampled_from(NAMES) | st.text("ab.\"'[] ", max_size=4),
    VALUES
    | ANY_TEXT.map(json.dumps)
    | st.sampled_from(["[1]", "{a=1}", "1979-05-27", "inf", "nan"]),
).map(" = ".join)


def give_a_configuration_or_a_usage_error(cls, arguments):
    presets = cls is TrainConfig
    error = tempfile.SpooledTemporaryFile(mode="w+", encoding="utf-8")
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
        try:
            config, given, *_ = load(cls, "Anything.", arguments, presets=presets)
            assert type(config) is cls and set(given) <= set(cls.__dataclass_fields__)
        except UserError:  # a preset that is not there
            assert presets
        except SystemExit as exit:
            error.seek(0)
            text = error.read()
            assert exit.code in (0, 2) and text.endswith("\n")
            text = re.sub("[" + re.escape("".join(["\n", *arguments])) + "]", "", text)
            assert text.isprintable() and "Traceback" not in text


any_flags = given(st.sampled_from(KINDS), st.lists(FLAGS | VALUES, max_size=4))
test_any_flags_give_a_configuration_or_a_usage_error = few(
    any_flags(give_a_configuration_or_a_usage_error)
)
test_more_flags_give_a_configuration_or_a_usage_error = pytest.mark.slow(
    many(any_flags(give_a_configuration_or_a_usage_error))
)


@properties
@given(
    st.sampled_from(KINDS), st.lists(TOML, max_size=3).map("\n".join).map(str.encode) | st.binary()
)
@example(TrainConfig, b"learning_rate = 1" + 400 * b"0")
def test_any_preset_gives_a_configuration_or_one_error(cls, content):
    with tempfile.TemporaryDirectory() as directory:
        preset = Path(directory, "any.toml")
        preset.write_bytes(content)
        try:
            values = read_preset(cls, preset)
        except UserError as error:
            assert "any.toml" in str(error)
            return
    with contextlib.suppress(ValueError):
        assert type(cls(**values)) is cls


LOGITS = st.lists(
    st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
    | st.sampled_from([0.0, 1.0, -math.inf]),
    min_size=1,
    max_size=30,
).filter(lambda logits: max(logits) > -math.inf)


def survivors(logits, **filters):
    probs = next_token_probs(torch.tensor([logits]), **filters)[0]
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and probs.min() >= 0
    assert probs[logits.index(max(logits))] > 0, "the likeliest always stays"
    return set(probs.nonzero()[:, 0].tolist())


@properties
@given(
    LOGITS,
    st.just(0.0) | st.floats(1e-40, 1e6),
    st.tuples(st.integers(1, 40), st.integers(1, 10**22)),
    st.tuples(st.floats(1e-300, 1), st.floats(1e-300, 1)),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_filters_leave_probabilities_and_are_monotone(logits, temperature, k, p, min_p):
    survivors(logits, temperature=temperature, top_k=k[0], top_p=p[0], min_p=min_p[0])
    low, high = ({"top_k": limit, "temperature": temperature} for limit in sorted(k))
    assert survivors(logits, **low) <= survivors(logits, **high)
    low, high = ({"top_p": limit, "temperature": temperature} for limit in sorted(p))
    assert survivors(logits, **low) <= survivors(logits, **high)
    high, low = ({"min_p": limit, "temperature": temperature} for limit in sorted(min_p))
    assert survivors(logits, **low) <= survivors(logits, **high)


# ---------------------------------------------------------------- fuzz


NASTY = [
    0,
    1,
    -1,
    2,
    3.5,
    10**9,
    10**12,
    2**32,
    2**63,
    10**30,
    1e308,
    math.nan,
    math.inf,
    True,
    None,
]
NASTY += [
    "",
    "x",
    "\ud800",
    "((",
    "(a+)+$",
    "a" * 1000,
    [],
    [[]],
    {},
    {"a": {}},
    "gpt2",
    "F16",
    "I8",
]


def small_checkpoint(directory):
    torch.manual_seed(0)
    encoding = build_tokenizer("byte", [], end_of_text=True)
    model = GPT(GPTConfig(block_size=8, vocab_size=257, n_layer=2, n_head=2, n_embd=8))
    save(model, directory, tokenizer_to_json(encoding))
    np.save(directory / "val.npy", np.arange(100, dtype=np.uint16))
    meta = {"format": 1, "sha256": "0" * 64}
    (directory / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def mutated_json(rng, value):
    """`value` with a value or key somewhere in it replaced, removed, doubled or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = value
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
                at = at[key]
                continue
            change = rng.randrange(4)
            if change == 0:
                del at[key]
            elif change == 1 and isinstance(at, dict):
                at[rng.choice(["", "x", "\ud800", *keys])] = at.pop(key)
            elif change == 2:
                at[key] = at[rng.choice(keys)]
            else:
                at[key] = rng.choice(NASTY)
            break
    return value


def mutated_bytes(rng, raw, within):
    """`raw` with some of its first `within` bytes changed, removed, repeated, or the rest cut."""
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 1, 3, 20])):
        i = rng.randrange(min(within, len(raw)) or 1)
        change = rng.randrange(5)
        if change == 0:
            raw[i : i + 1] = bytes([rng.randrange(256)])
        elif change == 1:
            raw[i : i + 1] = rng.choice(b"0123456789,{}[]\"':").to_bytes(1, "little")
        elif change == 2:
            del raw[i : i + rng.choice([1, 4, 50])]
        elif change == 3:
            raw[i:i] = raw[i : i + 4] * rng.choice([1, 10, 1000])
        elif rng.random() < 0.2:
            del raw[i:]
    return bytes(raw)


def mutated(rng, name, raw):
    if name.endswith(".json") and rng.random() < 0.8:
        return json.dumps(mutated_json(rng, json.loads(raw))).encode()
    if name.endswith(".safetensors"):
        size = int.from_bytes(raw[:8], "little")
        if rng.random() < 0.7:  # a header whose length is right
            header = json.dumps(mutated_json(rng, json.loads(raw[8 : 8 + size]))).encode()
            return len(header).to_bytes(8, "little") + header + raw[8 + size :]
        return mutated_bytes(rng, raw, 8 + size)
    return mutated_bytes(rng, raw, 128 if name.endswith(".npy") else len(raw))


def use(directory):
    """Open everything in a directory, as the scripts do, and use it."""
    read_meta(directory)
    encoding = load_tokenizer(directory)
    model = load_model(GPT, directory)
    for text in ("", "aaaaaaaab <|endoftext|>\n\n", "é🙂 it's 123   x"):
        ids = encode(encoding, text).tolist()
        assert encoding.decode(ids) == text
    tokens = [token.item() for token in model.generate(torch.tensor([[0]]), 10)]
    assert all(isinstance(encoding.decode_single_token_bytes(id), bytes) for id in tokens)


def fuzz(directory, n):
    """Use n mutated copies; print how many were right and refused, and the peak of memory."""
    small_checkpoint(directory)
    use(directory)
    rng, counts, slowest = random.Random(0), {"used": 0, "refused": 0}, 0
    names = ["config.json", "tokenizer.json", "model.safetensors"]
    originals = {name: (directory / name).read_bytes() for name in names}
    for i in range(n):
        name = names[i % len(names)] if i % 3 else names[i % 3]
        (directory / name).write_bytes(mutated(rng, name, originals[name]))
        started = time.perf_counter()
        try:
            use(directory)
            counts["used"] += 1
        except UserError:
            counts["refused"] += 1
        except ValueError as error:  # of generate, in the place of NaN
            assert "NaN or infinity" in str(error)
            counts["refused"] += 1
        except BaseException:
            shutil.copy(directory / name, directory / "guilty")
            print(f"case {i}: {name}", file=sys.stderr)
            raise
        slowest = max(slowest, time.perf_counter() - started)
        (directory / name).write_bytes(originals[name])
    use(directory)
    peak = 1e6 * peak_megabytes()
    counts["peak"] = 0 if math.isnan(peak) else peak  # Windows
    print(json.dumps(counts | {"slowest": slowest}))


@pytest.mark.parametrize("n", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_files_are_used_or_refused(tmp_path, n):
    """In a process of its own: a panic in native code, too much memory or a hang would show."""
    command = [sys.executable, "-m", "tests.test_hostile", str(tmp_path), str(n)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert process.returncode == 0 and not process.stderr, process.stderr.decode()[-3000:]
    counts = json.loads(process.stdout)
    assert counts["used"] > n / 20 and counts["refused"] > n * 0.4
    assert counts["peak"] < 1e9 and counts["slowest"] < 5


# ---------------------------------------------------------------- particular files


PATTERNS = ["", "a*", "(?:x|)", "(?=a)", r"\b", "$", "a*?", r"\s+", "(a+)+$|(?!x)", r"\Ga*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_pattern_of_a_stranger_loses_text(tmp_path, pattern):
    """tiktoken panics at an empty match, and leaves out what no match covers."""
    ranks = build_tokenizer("byte", [], False)._mergeable_ranks
    tokenizer = json.loads(tokenizer_to_json(build_tokenizer("byte", [], False)))
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    encoding = load_tokenizer(tmp_path)
    assert encoding._pat_str == pattern and encoding._mergeable_ranks == ranks
    for text in ("", "bbaab", "aaaa b\n", "ab\nba\n\n", "é🙂"):
        assert encoding.decode(encode(encoding, text).tolist()) == text


@pytest.mark.parametrize("pattern, named", [(r"a\K", "K"), (r"(a|aa)+\1c", "gives up")])
def test_patterns_that_cannot_be_made_safe_are_refused(tmp_path, pattern, named):
    tokenizer = json.loads(tokenizer_to_json(build_tokenizer("byte", [], False)))
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(UserError, match=named):
        encode(load_tokenizer(tmp_path), "a" * 5000 + "b")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("Windows has no named pipes")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        small_checkpoint(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError):
            use(tmp_path)
        (tmp_path / name).unlink()


# ---------------------------------------------------------------- code


def test_nothing_in_a_directory_is_executed(tmp_path, monkeypatch):
    """Neither what transformers would run with trust_remote_code, nor what Python would import."""
    monkeypatch.chdir(tmp_path)
    small_checkpoint(tmp_path)
    evil = 'import os\nos.mkdir("ran")\n'
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py", "torch.py"):
        (tmp_path / name).write_text(evil)
    code = {
        "auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "configuration.Evil"}
    }
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "meta.json"):
        values = json.loads((tmp_path / name).read_text(encoding="utf-8")) if name != "x" else {}
        values |= code | {"_name_or_path": "../..", "custom_pipelines": {"x": {"impl": "evil.py"}}}
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")
    for name in ("pytorch_model.bin", "model.bin", "training_state.pt"):
        torch.save({"x": Evil()}, tmp_path / name)
    (tmp_path / "preset.toml").write_text("out_dir = \"__import__('os').mkdir('ran')\"\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    use(tmp_path)
    load_model(GPT, find_checkpoint(tmp_path))
    read_preset(TrainConfig, tmp_path / "preset.toml")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "model.safetensors").unlink()  # the pickled weights do not stand in
    with pytest.raises(UserError, match="pickle"):
        load_model(GPT, tmp_path)
    assert not (tmp_path / "ran").exists()


SOURCES = sorted([*ROOT.glob("*.py"), *(ROOT / "gptling").glob("*.py"), *ROOT.glob("docs/*.py")])


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_source_has_no_way_to_run_what_it_reads(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not {"pickle", "marshal", "shelve", "dill", "joblib", "yaml"} & set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            assert [a.name for a in node.names] == ["UnpicklingError"]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, options = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert name not in ("exec", "eval", "compile", "__import__")
        assert name not in ("torch.load",) or options.get("weights_only") == "True"
        if name == "importlib.import_module":  # a package that is named in the source
            assert isinstance(call.args[0], ast.Constant) or "optional_package" in file.read_text()
        assert "allow_pickle" not in options and "trust_remote_code" not in options


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_package_knows_no_script_and_the_model_nothing_of_ours(file):
    tree, scripts = ast.parse(file.read_text(encoding="utf-8")), {f.stem for f in ROOT.glob("*.py")}
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imported += [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    forbidden = {"model": {"gptling", *scripts}}.get(file.stem, scripts)
    if file.stem == "model" or file.parent == ROOT / "gptling":
        assert not forbidden & {name.split(".")[0] for name in imported}


# ---------------------------------------------------------------- absurd numbers


def test_absurd_numbers_of_tokens_are_right(trained):
    common = ["sample.py", "out/mine", "--prompt=12 green", "--stop=\\n"]
    absurd = [f"--max_new_tokens={2**63 - 1}", f"--top_k={2**63 - 1}", "--seed", 2**63 - 1]
    for arguments in (absurd, [*absurd, "--num_samples=2"]):
        plain = ["--max_new_tokens=1000", "--top_k=0", *arguments[2:]]
        process = run_here(*common, *arguments, cwd=trained)
        assert process.returncode == 0 and process.stdout.startswith(b"12 green")
        assert process.stdout == run_here(*common, *plain, cwd=trained).stdout


if __name__ == "__main__":
    fuzz(Path(sys.argv[1]), int(sys.argv[2]))

"""sample.py: text as a user gets it."""

import re
import shutil
import sys
from unittest import mock

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from gptling import decoding
from gptling.decoding import GraphedStep, Sample, speed_up
from gptling.gpt2_format import save
from gptling.tokenizers import ANY_CHARACTER, build_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from sample import SampleConfig, make_samples
from tests.scripts import output_here, output_of, run_here, run_script
from tests.test_explain import random_model
from tests.try_model import generate


def test_text_begins_with_the_prompt_and_standard_output_has_nothing_else(trained):
    """Standard error has a header before a blank line, and ends with the speed."""
    arguments = ["out/mine", "--prompt", "12 green bottles", "--max_new_tokens=30"]
    process = run_script("sample.py", *arguments, cwd=trained)
    text, said = process.stdout.decode(), process.stderr.decode()
    assert text.startswith("12 green bottles") and len(text) == 16 + 30 + 1
    speed = r"30 tokens in \d+\.\d s \([\d,]+ tokens/s\)"
    assert re.fullmatch(rf"out/mine/checkpoint-20: .* parameters; .*\n\n\n{speed}\n", said), said
    arguments[2] = "-"
    assert output_of("sample.py", *arguments, cwd=trained, stdin="12 green bottles\n") == text


def test_backslash_n_is_a_newline_in_flags_and_nowhere_else(trained):
    assert SampleConfig(stop=(r"\n", r"a\n")).stop == ("\n", "a\n")
    common = ["--max_new_tokens=0", "--prompt"]
    text = output_here("sample.py", "out/mine", *common, r"wall,\n1", cwd=trained)
    assert text == "wall,\n1\n"
    process = run_here("sample.py", "out/mine", *common, "-", cwd=trained, stdin=r"wall,\n1")
    assert r"has no '\\'" in process.stderr.decode()


def test_a_run_on_pythons_source_begins_with_def(letters, tmp_path):
    """Unless there is a prompt, or the run has another text."""
    shutil.copytree(letters, tmp_path / "run" / "checkpoint-1")
    cases = {("quickstart", "--seed=1"): "def", ("quickstart", "--prompt=c"): "cdef"}
    for (dataset, flag), text in (cases | {("mine", "--seed=1"): "abcdef"}).items():
        (tmp_path / "run" / "config.toml").write_text(f'dataset = "{dataset}"\n')
        process = run_here("sample.py", "run/checkpoint-1", flag, cwd=tmp_path)
        assert process.stdout.decode() == f"{text}\n"
        assert ("--prompt def" in process.stderr.decode()) == (text == "def")


def test_seeds_reproduce_and_samples_differ(trained):
    def sample(*arguments):
        return output_of("sample.py", "out/mine", "--max_new_tokens=40", *arguments, cwd=trained)

    first = sample("--seed=5", "--num_samples=2").split("\n---\n")
    assert first[0] != first[1]
    assert sample("--seed=5", "--temperature=0.8") == first[0] + "\n"
    assert sample("--seed=6") == first[1]
    assert sample("--temperature=0", "--seed=5") == sample("--temperature=0", "--seed=6")


@pytest.mark.parametrize("way", ["--prompt", "--prompts", "--interactive"])
def test_end_of_text_in_a_prompt_is_its_token(letters, way):
    """After which NextLetter begins with a. A tokenizer without it reports the first character that
    it lacks, and is asked for no other."""
    (letters / "prompts.txt").write_text("ab<|endoftext|>")
    prompt = {"--prompt": "ab<|endoftext|>", "--prompts": "prompts.txt"}.get(way)
    arguments = [letters, way, *filter(None, [prompt]), "--max_new_tokens=3"]
    process = run_here("sample.py", *arguments, cwd=letters, stdin="ab<|endoftext|>\n\n")
    assert process.stdout.decode() == "ab<|endoftext|>abc\n"
    plain = build_tokenizer("char", ["abcdef<|endoftext|"], end_of_text=False)
    (letters / "tokenizer.json").write_text(tokenizer_to_json(plain), encoding="utf-8")
    process = run_here("sample.py", *arguments, cwd=letters, stdin="ab<|endoftext|>\n\n")
    assert "the tokenizer has no '>' (U+003E)" in process.stderr.decode()


def test_special_tokens_in_a_prompt_are_those_of_transformers(tmp_path):
    """Another than end-of-text too, also next to each other and in part."""
    ranks = {bytes([i]): i for i in range(256)}
    special = {"<|endoftext|>": 256, "<|user|>": 257}
    kinds = {"mergeable_ranks": ranks, "special_tokens": special}
    tokenizer = tiktoken.Encoding("bytes", pat_str=ANY_CHARACTER, **kinds)
    text = "<|user|>é<|endoftext|><|endoftext|>\n<|user|> <|use<|user|><|endoftext"
    samples = make_samples(tokenizer, [text], SampleConfig())
    assert samples[0].ids == Tokenizer.from_str(tokenizer_to_json(tokenizer)).encode(text).ids
    assert samples[0].ids.count(257) == 3


def test_prompts_of_a_file_give_what_each_gives_alone(trained, tmp_path):
    """Also past the window, in which 16 tokens fit, and with the seed of each sample."""
    prompts = [" 7 gr", "12 green bottles hanging", "1", "12 green bottles"]
    (tmp_path / "prompts.txt").write_bytes("\r\n".join([*prompts, ""]).encode())
    common = ["out/mine", "--max_new_tokens=60", "--top_k=20", "--top_p=0.9", "--min_p=0.01"]
    common.append("--num_samples=2")
    batch = output_of("sample.py", *common, f"--prompts={tmp_path / 'prompts.txt'}", cwd=trained)
    alone = [output_of("sample.py", *common, "--prompt", prompt, cwd=trained) for prompt in prompts]
    assert batch == "\n---\n".join(text[:-1] for text in alone) + "\n"


def test_interactive_mode_completes_one_prompt_after_another(trained):
    """The same prompt gets another text each time; an unknown character ends nothing."""
    stdin = " 12 green\nü\n 12 green\n\n3 green\n"
    arguments = ["out/mine", "--max_new_tokens=40", "--num_samples=2"]
    process = run_script("sample.py", *arguments, "--interactive", cwd=trained, stdin=stdin)
    assert process.returncode == 0 and "'ü'" in process.stderr.decode()
    arguments += ["--prompt= 12 green"]
    first = output_of("sample.py", *arguments, cwd=trained)
    other = output_of("sample.py", *arguments, "--seed=1341", cwd=trained)
    assert process.stdout.decode() == first + other and first != other


def test_ctrl_c_ends_a_text_and_not_the_conversation(trained, monkeypatch):
    generate = mock.Mock(side_effect=[KeyboardInterrupt, iter(())])
    monkeypatch.setattr(GPT, "generate", generate)
    arguments = ["out/mine", "--interactive"]
    text = output_here("sample.py", *arguments, cwd=trained, stdin="12 green\n7 green\n\n")
    assert text == "12 green\n7 green\n"


def test_a_long_prompt_is_cut_with_a_notice(trained):
    arguments = ["out/mine", "--prompt", "12 green bottles hanging", "--max_new_tokens=5"]
    process = run_here("sample.py", *arguments, cwd=trained)
    assert "the model sees the last 16 of 24 tokens" in process.stderr.decode()
    assert process.stdout.decode().startswith("12 green bottles hanging")


PRINTED = []  # by sample.py before each token of NextLetter


class NextLetter(GPT):
    """Draws the id after the last one."""

    def next_logits(self, idx, padding_mask=None, cache=None):
        PRINTED.append(sys.stdout.buffer.getvalue())
        V = self.config.vocab_size
        return 1000.0 * F.one_hot((idx[:, -1] + 1) % V, V)


@pytest.fixture
def letters(tmp_path, monkeypatch):
    """A directory with a checkpoint of NextLetter, of six letters and end-of-text after them."""
    tokenizer = tokenizer_to_json(build_tokenizer("char", ["abcdef"], end_of_text=True))
    monkeypatch.setattr("sample.GPT", NextLetter)
    directory = tmp_path / "letters"
    save(NextLetter(GPTConfig(16, 7, 1, 1, 4)), directory, tokenizer)
    return directory


def test_texts_end_in_any_order_and_are_printed_in_theirs(letters):
    """At a stop text, or at end-of-text, after which nothing follows."""
    (letters / "prompts.txt").write_text("a\ne\n\nfabc\n")
    stopped = {"d": "abc ef abc fabc", "f": "abcde e abcde fabcde", "x": "abcdef ef abcdef fabcdef"}
    for stop, texts in stopped.items():
        stops = [f"--stop={stop}", "--stop=XYZ"]
        arguments = [letters, "--prompts=prompts.txt", *stops, "--num_samples=2"]
        process = run_here("sample.py", *arguments, cwd=letters)
        expected = [text for text in texts.split() for _ in range(2)]
        assert process.stdout.decode() == "\n---\n".join(expected) + "\n"
    assert f"\n{2 * (6 + 2 + 7 + 4)} tokens in " in process.stderr.decode()


def test_a_text_appears_token_by_token_and_nothing_is_drawn_after_its_end(letters):
    run_here("sample.py", letters, "--prompt=abc", cwd=letters)
    assert PRINTED[-4:] == [b"abc", b"abcd", b"abcde", b"abcdef"]


# ---------------------------------------------------------------------------- speed
def steps(model, idx, mask=None):
    """Logits (n, B, V) after a prompt of 8 and each token after it, by generate's way of a step."""
    cache, logits = model.new_cache(), []
    for start, end in [(0, 8), *((T, T + 1) for T in range(8, idx.size(1)))]:
        padding_mask = None if mask is None else mask[:, :end].clone()
        new = idx[:, start:end].clone(memory_format=torch.contiguous_format)
        logits.append(model.next_logits(new, padding_mask, cache).clone())
    return torch.stack(logits)


SPED_UP = [({}, torch.float32, True), ({"n_embd": 256}, torch.bfloat16, True)]
SPED_UP += [({"n_embd": 256, "bias": False}, torch.float32, False)]


@pytest.mark.parametrize("sizes, dtype, padded", SPED_UP)
def test_speed_changes_no_logits_but_for_rounding(sizes, dtype, padded):
    """Of one row or of a padded batch, in oneDNN's layouts where the model is wide, with keys in
    float32. The model itself does not change at all."""
    model, idx = random_model(**sizes).to(dtype), torch.randint(97, (2 if padded else 1, 12))
    mask = torch.arange(12) >= torch.tensor([[0], [3]]) if padded else None
    with torch.inference_mode():
        expected = steps(model, idx, mask)
        fast = speed_up(model, rows=len(idx))
        assert fast is not model, "it has been compared, and is the fast one"
        atol = (1e-4 if dtype == torch.float32 else 0.05) * expected.abs().max().item()
        torch.testing.assert_close(steps(fast, idx, mask), expected, rtol=0, atol=atol)
        assert torch.equal(steps(model, idx, mask), expected)


def test_a_faster_step_that_computes_something_else_is_left_out(monkeypatch, capsys):
    """In the step of one token alone."""

    def use_onednn(model):
        step = model.next_logits
        model.next_logits = lambda idx, *more: step(idx, *more) * (1.1 if idx.size(1) == 1 else 1)

    monkeypatch.setattr(decoding, "use_onednn", use_onednn)
    model = random_model(n_embd=256)
    assert speed_up(model) is model
    said = "slower decoding: faster layers give other logits\n"
    assert capsys.readouterr().err == said


def test_models_of_one_token_are_sped_up(capsys):
    model, idx = random_model(n_embd=256, block_size=1), torch.randint(97, (2, 1))
    texts = (generate(each, idx, 9, temperature=0) for each in (speed_up(model), model))
    assert torch.equal(*texts)
    assert not capsys.readouterr().err


class GraphOnACPU(GraphedStep):
    """Computes again what was captured. A GPU's: tests/test_gpu.py."""

    def capture(self, idx, cache):
        with mock.patch("torch.cuda"):
            super().capture(idx, cache)
        self.graph.replay = self.replay

    def replay(self):
        self.visible.index_fill_(1, self.slot, True)
        self.logits.copy_(self.plain(self.idx, self.visible, self.static))
        self.replays = getattr(self, "replays", 0) + 1


@pytest.mark.parametrize("padded", [False, True])
def test_a_graph_of_a_step_changes_no_text(padded):
    fast, idx = random_model(), torch.randint(97, (3, 8))
    fast.next_logits = GraphOnACPU(fast.next_logits, compile=False)
    mask = torch.arange(8) >= torch.tensor([[0], [3], [7]]) if padded else None
    for _ in range(2):
        texts = []
        for model in (fast, random_model()):
            options = {"padding_mask": mask, "generator": torch.Generator().manual_seed(0)}
            texts.append(generate(model, idx, 100, **options))  # past the window
        assert torch.equal(*texts)
    assert fast.next_logits.replays > 130


# ---------------------------------------------------------------------------- streams
@pytest.mark.parametrize(
    "text", ["naïve 🙂 你好", "a\n\nb END c", "ENENDED", "\ud7ff\U0010ffff", "xaaaab", "aabaaaa"]
)
@pytest.mark.parametrize(
    "stop", [(), ("END",), ("\n\n", "🙂"), ("aab",), ("aaaac", "aab"), ("c", "END")]
)
def test_a_text_has_whole_characters_up_to_the_stop_text(text, stop):
    expected = min((text[: text.find(s)] for s in stop if s in text), key=len, default=text)
    for size in (1, 2, 3, 5, 100):
        sample = Sample("", [], stop)
        raw = text.encode()
        for i in range(0, len(raw), size):
            sample.feed(raw[i : i + size])
            assert expected.startswith(sample.unprinted)
        sample.feed(b"", final=True)
        assert sample.unprinted == expected


def test_text_is_held_back_where_a_stop_text_may_have_begun():
    """Bytes that are no text are replaced."""
    sample, seen = Sample("A ", [1], ("END",)), []
    for raw in (b"caf\xc3", b"\xa9\xff E", b"Nte EN", b"D!"):
        sample.feed(raw)
        seen.append(sample.unprinted)
    assert seen == ["A c", "A café\ufffd", *2 * ["A café\ufffd ENte "]] and sample.ended

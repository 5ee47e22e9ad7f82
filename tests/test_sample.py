"""sample.py: text as a user gets it."""

import shutil

import pytest
import torch

from model import GPT, GPTConfig, KVCache
from prepare import build_tokenizer, tokenizer_to_json
from sample import TextStream, compile_decoding, find_checkpoint, use_onednn
from tests.conftest import output_of, run_script


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A checkpoint that draws any byte with the same probability."""
    directory = tmp_path_factory.mktemp("byte")
    model = GPT(GPTConfig(16, 256, 1, 1, 4))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(directory, tokenizer_to_json(build_tokenizer("byte", [], False)))
    return directory


def test_newest_run_and_named_checkpoints_give_the_same_text(trained, tmp_path):
    shutil.copytree(trained / "out", tmp_path / "out")  # without data/
    texts = [
        output_of("sample.py", *arguments, "--max_new_tokens=50", cwd=tmp_path)
        for arguments in ([], ["out/mine"], ["out/mine/checkpoint-20"])
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) >= 50


def test_the_best_checkpoint_of_a_run_is_taken(tmp_path):
    for step, loss in ((5, 2.0), (10, 1.5), (20, 1.7)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "metrics.json").write_text(f'{{"val_loss": {loss}}}')
    assert find_checkpoint(str(tmp_path)).name == "checkpoint-10"


def test_text_begins_with_the_prompt_and_standard_output_has_nothing_else(trained):
    arguments = ["out/mine", "--prompt", "12 green", "--max_new_tokens=30"]
    process = run_script("sample.py", *arguments, cwd=trained)
    text = process.stdout.decode()
    assert text.startswith("12 green") and len(text) == len("12 green") + 30 + 1
    assert b"parameters" in process.stderr
    from_input = output_of("sample.py", "out/mine", "--prompt", "-", "--max_new_tokens=30",
                           cwd=trained, stdin="12 green\n")  # fmt: skip
    assert from_input == text


def test_seeds_reproduce_and_samples_differ(trained):
    def sample(*arguments):
        return output_of("sample.py", "out/mine", "--max_new_tokens=40", *arguments, cwd=trained)

    first = sample("--seed=5", "--num_samples=2").split("\n---\n")
    assert first[0] != first[1]
    assert sample("--seed=5") == first[0] + "\n"
    assert sample("--seed=6") == first[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_changes_no_logits_but_for_rounding(dtype, bias):
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 97, 2, 2, 64, bias=bias)).eval().to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    idx = torch.randint(97, (3, 20))
    with torch.no_grad():
        expected = model.next_logits(idx)
        use_onednn(model)
        logits = model.next_logits(idx)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * expected.abs().max())


def test_compiling_changes_no_text_and_says_what_it_took(trained, tmp_path):
    """Past block_size too, where the cache is built anew."""
    arguments = ["out/mine", "--dtype=float32", "--max_new_tokens=40"]
    text = output_of("sample.py", *arguments, cwd=trained)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = run_script("sample.py", *arguments, "--compile", cwd=trained, **cache)
    assert process.returncode == 0 and process.stdout.decode() == text
    assert b"compiled in" in process.stderr


@pytest.mark.parametrize(("dtype", "padded"), [(torch.float32, True), (torch.bfloat16, False)])
def test_compiling_changes_no_logits_but_for_rounding(dtype, padded, capfd):
    """Of one row and of a padded batch, at several lengths by one compilation."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 97, 2, 2, 64)).eval().to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    idx = torch.randint(97, (2 if padded else 1, 12))
    mask = torch.arange(12) >= torch.tensor([[0], [3]]) if padded else None

    def steps():
        cache = [KVCache() for _ in model.h]
        model.next_logits(idx[:, :8], mask[:, :8] if padded else None, cache)
        for T in range(8, 12):
            new = idx[:, T : T + 1]
            yield model.next_logits(new, mask[:, : T + 1].clone() if padded else None, cache)

    with torch.inference_mode():
        expected = torch.stack(list(steps()))
        compile_decoding(model)
        logits = torch.stack(list(steps()))
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * expected.abs().max())
    assert capfd.readouterr().err.count("compiled in") == 1


def test_compiling_without_a_compiler_is_one_line(trained, tmp_path):
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "/nonexistent"}
    process = run_script("sample.py", "out/mine", "--compile", cwd=trained, **caches)
    *_, error = process.stderr.decode().splitlines()
    assert process.returncode == 1 and "--compile" in error and "Traceback" not in error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_text_is_drawn_in_every_dtype(trained, dtype):
    arguments = ["--max_new_tokens=30", f"--dtype={dtype}"]
    process = run_script("sample.py", "out/mine", *arguments, cwd=trained)
    assert len(process.stdout) == 31 and dtype in process.stderr.decode()


def test_prompts_of_a_file_give_what_each_gives_alone(trained, tmp_path):
    prompts = ["7 gr", "the wall", "1"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    common = ["out/mine", "--max_new_tokens=40"]
    batch = output_of("sample.py", *common, f"--prompts={tmp_path / 'prompts.txt'}", cwd=trained)
    alone = [output_of("sample.py", *common, "--prompt", prompt, cwd=trained) for prompt in prompts]
    assert batch.split("\n---\n") == [alone[0][:-1], alone[1][:-1], alone[2]]


def test_greedy_ignores_the_seed(trained):
    common = ["out/mine", "--temperature=0", "--max_new_tokens=40", "--top_k=1000000"]
    texts = [output_of("sample.py", *common, f"--seed={seed}", cwd=trained) for seed in (1, 2)]
    assert texts[0] == texts[1]


def test_text_ends_before_a_stop_text(trained):
    common = ["out/mine", "--prompt=12 green", "--temperature=0"]
    whole = output_of("sample.py", *common, cwd=trained)
    stop = whole[20:23]
    text = output_of("sample.py", *common, "--stop", stop, "--stop=XYZ", cwd=trained)
    assert text == whole[: 8 + whole[8:].index(stop)] + "\n"


def test_output_is_valid_utf8_whatever_the_locale(byte_model):
    arguments = [byte_model, "--prompt=é🙂", "--temperature=2", "--top_k=0"]
    for n in (0, 50, 200):
        process = run_script("sample.py", *arguments, f"--max_new_tokens={n}", cwd=byte_model,
                             LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")  # fmt: skip
        assert process.returncode == 0
        assert process.stdout.decode("utf-8").startswith("é🙂")


def test_interactive_mode_completes_one_prompt_after_another(trained):
    stdin = "12 green\nü\n7 green\n\n3 green\n"
    arguments = ["out/mine", "--interactive", "--max_new_tokens=10"]
    process = run_script("sample.py", *arguments, cwd=trained, stdin=stdin)
    lines = process.stdout.decode()
    assert process.returncode == 0
    assert lines.startswith("12 green") and "\n7 green" in lines and "3 green" not in lines
    assert "'ü'" in process.stderr.decode()


def test_a_long_prompt_is_cut_with_a_notice(trained):
    arguments = ["out/mine", "--prompt", "12 green bottles hanging", "--max_new_tokens=5"]
    process = run_script("sample.py", *arguments, cwd=trained)
    assert process.returncode == 0
    assert "24 tokens, the model sees 16" in process.stderr.decode()
    assert process.stdout.decode().startswith("12 green bottles hanging")


def test_generation_stops_at_end_of_text(tmp_path):
    model = GPT(GPTConfig(16, 257, 1, 1, 4, bias=True))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.ones_(model.ln_f.bias)
    model.wte.weight.data[256] = 10.0  # always the likeliest
    model.save_pretrained(tmp_path, tokenizer_to_json(build_tokenizer("byte", [], True)))
    text = output_of("sample.py", tmp_path, "--prompt=abc", "--temperature=0", cwd=tmp_path)
    assert text == "abc\n"


@pytest.mark.parametrize("text", ["naïve 🙂 你好", "a\n\nb END c", "ENENDED", "\ud7ff\U0010ffff"])
@pytest.mark.parametrize("stop", [(), ("END",), ("\n\n", "🙂")])
def test_stream_gives_whole_characters_up_to_the_stop_text(text, stop):
    expected = min((text[: text.find(s)] for s in stop if s in text), key=len, default=text)
    for size in (1, 2, 3, 5):
        stream, parts = TextStream(stop), []
        raw = text.encode()
        for i in range(0, len(raw), size):
            parts.append(stream.feed(raw[i : i + size]))
        parts.append(stream.feed(b"", final=True))
        assert "".join(parts) == expected
        assert "\ufffd" not in "".join(parts)


def test_stream_replaces_bytes_that_are_no_text():
    stream = TextStream()
    assert stream.feed(b"a\xff\xe4") + stream.feed(b"", final=True) == "a\ufffd\ufffd"

"""sample.py: text as a user gets it."""

import contextlib
import copy
import gc
import math
import os
import shutil
import weakref

import pytest
import torch

from gptling import decoding
from gptling.cli import UserError, load
from gptling.decoding import speed_up
from gptling.gpt2_format import save
from gptling.pretrained import find_checkpoint
from gptling.steps import GraphedStep
from gptling.streaming import Sample
from gptling.tokenizers import build_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from sample import SampleConfig
from tests.conftest import output_of, run_here, run_script
from tests.edits import edited_module


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A checkpoint that draws any byte with the same probability."""
    directory = tmp_path_factory.mktemp("byte")
    model = GPT(GPTConfig(16, 256, 1, 1, 4))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    save(model, directory, tokenizer_to_json(build_tokenizer("byte", [], False)))
    return directory


def test_newest_run_and_named_checkpoints_give_the_same_text(trained, tmp_path):
    shutil.copytree(trained / "out", tmp_path / "out")  # without data/
    texts = [
        output_of("sample.py", *arguments, "--max_new_tokens=50", cwd=tmp_path)
        for arguments in ([], ["out/mine"], ["out/mine/checkpoint-20"])
    ]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) >= 50


def test_the_newest_run_is_the_one_that_has_changed_last(trained, tmp_path, monkeypatch):
    """Whatever its name."""
    monkeypatch.chdir(tmp_path)
    for i, name in enumerate("bca"):
        shutil.copytree(trained / "out/mine", tmp_path / "out" / name)
        os.utime(tmp_path / "out" / name, (1e9 + i, 1e9 + i))
    assert find_checkpoint("").parts[-2] == "a"
    os.utime(tmp_path / "out/b", (2e9, 2e9))
    assert find_checkpoint("").parts[-2] == "b"


def test_the_best_checkpoint_of_a_run_is_taken(tmp_path):
    """Of equal ones the newest."""
    for step, loss in ((5, 2.0), (7, 1.5), (10, 1.5), (20, 1.7)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text("{}")
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
    line = output_of("sample.py", *common, "--stop", r"\n", cwd=trained)
    assert line == whole[: 8 + whole[8:].index("\n")] + "\n"


def test_output_is_valid_utf8_whatever_the_locale(byte_model):
    arguments = [byte_model, "--prompt=a", "--temperature=2", "--top_k=0"]
    process = run_script("sample.py", *arguments, "--max_new_tokens=100", cwd=byte_model,
                         LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")  # fmt: skip
    assert process.returncode == 0
    text = process.stdout.decode("utf-8")
    assert text.startswith("a") and len(text) > 50
    process = run_here(
        "sample.py", byte_model, "--prompt=é🙂", "--max_new_tokens=0", cwd=byte_model
    )
    assert process.stdout.decode("utf-8") == "é🙂\n"


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
    assert "the model sees the last 16 of 24 tokens" in process.stderr.decode()
    assert process.stdout.decode().startswith("12 green bottles hanging")


class NextLetter(GPT):
    """Draws the id after the last one."""

    def next_logits(self, idx, padding_mask=None, cache=None):
        V = self.config.vocab_size
        return 1000.0 * torch.nn.functional.one_hot((idx[:, -1] + 1) % V, V)


@pytest.fixture
def letters(tmp_path, monkeypatch):
    """A directory with a checkpoint of NextLetter, of six letters and end-of-text after them."""
    tokenizer = tokenizer_to_json(build_tokenizer("char", ["abcdef"], end_of_text=True))
    monkeypatch.setattr("sample.GPT", NextLetter)
    save(NextLetter(GPTConfig(16, 7, 1, 1, 4)), tmp_path, tokenizer)
    return tmp_path


def test_generation_stops_at_end_of_text(letters):
    (letters / "prompts.txt").write_text("c\n\nfabc\n")
    process = run_here("sample.py", letters, "--prompts=prompts.txt", cwd=letters)
    assert process.stdout.decode() == "cdef\n---\nabcdef\n---\nfabcdef\n"


def test_texts_end_in_any_order_and_are_printed_in_theirs(letters):
    (letters / "prompts.txt").write_text("a\ne\nc\n")
    for stop, texts in (("d", ["abc", "ef", "c"]), ("f", ["abcde", "e", "cde"])):
        arguments = [letters, "--prompts=prompts.txt", f"--stop={stop}", "--num_samples=2"]
        process = run_here("sample.py", *arguments, cwd=letters)
        expected = [text for text in texts for _ in range(2)]
        assert process.stdout.decode() == "\n---\n".join(expected) + "\n"


# ---------------------------------------------------------------------------- mistakes


def test_logits_that_are_not_numbers_are_one_line(letters, monkeypatch):
    monkeypatch.setattr(NextLetter, "next_logits", lambda *_: torch.full((1, 7), math.nan))
    for temperature in (0, 0.8):
        process = run_here("sample.py", letters, f"--temperature={temperature}", cwd=letters)
        error = process.stderr.decode().splitlines()[-1]
        assert process.returncode == 1 and "NaN or infinity" in error and "--dtype" in error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to")])
def test_memory_that_ends_is_one_line(letters, monkeypatch, error):
    def next_logits(*_):
        raise error

    monkeypatch.setattr(NextLetter, "next_logits", next_logits)
    process = run_here("sample.py", letters, "--num_samples=3", cwd=letters)
    last = process.stderr.decode().splitlines()[-1]
    assert process.returncode == 1 and "out of memory" in last and "Traceback" not in last


def test_a_token_that_the_model_lacks_is_one_line(letters):
    tokenizer = tokenizer_to_json(build_tokenizer("char", ["abcdefghij"], end_of_text=False))
    (letters / "tokenizer.json").write_text(tokenizer)
    process = run_here("sample.py", letters, "--prompt=aj", cwd=letters)
    error = process.stderr.decode().splitlines()[-1]
    assert process.returncode == 1 and "token 9" in error and "Traceback" not in error


@pytest.mark.parametrize(
    "argument, named",
    [
        ("--top_p=0", "above 0"),
        ("--top_p=1.5", "at most 1"),
        ("--min_p=2", "at most 1"),
        ("--temperature=-1", "at least 0"),
        ("--num_samples=0", "at least 1"),
        ("--stop=", "not empty"),
        ("--prompts=x --interactive", "--prompt, --prompts and --interactive"),
        ("--prompt=x --prompts=y", "--prompt, --prompts and --interactive"),
    ],
)
def test_settings_that_make_no_sense_are_usage_errors(capsys, argument, named):
    with pytest.raises(SystemExit) as exit:
        load(SampleConfig, "", argument.split())
    error = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert exit.value.code == 2 and argument.split("=")[0] in error and named in error


# ---------------------------------------------------------------------------- speed


def changed_gpt(config):
    """Another architecture: rotary positions and SwiGLU."""
    return edited_module("rope", "swiglu").GPT(config)


def random_model(model_class, **sizes):
    """Its weights are large enough for an error to show in the logits."""
    torch.manual_seed(0)
    sizes = {"block_size": 32, "vocab_size": 97, "n_layer": 2, "n_head": 2, "n_embd": 64} | sizes
    model = model_class(GPTConfig(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def steps(model, idx, mask=None):
    """Logits (n, B, V) after a prompt of 8 and each token after it, by generate's way of a step."""
    cache, logits = model.new_cache(), []
    with torch.inference_mode():
        for start, end in [(0, 8), *((T, T + 1) for T in range(8, idx.size(1)))]:
            padding_mask = None if mask is None else mask[:, :end].clone()
            new = idx[:, start:end].clone(memory_format=torch.contiguous_format)
            logits.append(model.next_logits(new, padding_mask, cache))
    return torch.stack(logits)


def check_speed_up(model, padded, **options):
    """speed_up changes no logits but for rounding, of one row or of a padded batch, and the model
    itself not at all. Returns the fast model."""
    idx = torch.randint(97, (2 if padded else 1, 12))
    mask = torch.arange(12) >= torch.tensor([[0], [3]]) if padded else None
    expected = steps(model, idx, mask)
    if options:
        torch.compiler.reset()  # what other tests have compiled counts towards a limit
    fast = speed_up(model, **options)
    tolerance = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
    atol = tolerance * expected.abs().max().item()
    torch.testing.assert_close(steps(fast, idx, mask), expected, rtol=0, atol=atol)
    assert vars(fast) is not vars(model), "it has been compared, and is the fast one"
    assert torch.equal(steps(model, idx, mask), expected)
    return fast


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "model_class, sizes",
    [
        (GPT, {}),
        (GPT, {"n_embd": 256, "bias": False}),
        pytest.param(changed_gpt, {"n_embd": 256}, marks=pytest.mark.gpt2),
    ],
)
def test_speed_changes_no_logits_but_for_rounding(model_class, sizes, dtype, padded):
    """In oneDNN's layouts where the model is wide, and with keys in float32."""
    check_speed_up(random_model(model_class, **sizes).to(dtype), padded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_class, dtype, padded",
    [
        (GPT, torch.float32, True),
        (GPT, torch.bfloat16, False),
        pytest.param(changed_gpt, torch.float32, False, marks=pytest.mark.gpt2),
        pytest.param(changed_gpt, torch.bfloat16, True, marks=pytest.mark.gpt2),
    ],
)
def test_compiling_changes_no_logits_but_for_rounding(model_class, dtype, padded, capfd):
    """At several lengths by one compilation."""
    check_speed_up(random_model(model_class).to(dtype), padded, compile=True)
    assert capfd.readouterr().err.count("compiled in") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, emulated", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_compiling_a_block_of_a_wide_model_changes_no_logits(dtype, emulated, monkeypatch, capfd):
    """One compilation for all blocks, one for the output layer, whose row is the last of many or
    stands alone; in bfloat16 with the matmuls that this processor has, and with those in float32
    of one that has none."""
    if emulated:
        monkeypatch.setattr("gptling.decoding.has_fast_matmul", lambda dtype: dtype.itemsize > 2)
    check_speed_up(random_model(GPT, n_embd=256).to(dtype), False, compile=True)
    assert capfd.readouterr().err.count("compiled in") == 2


def compile_by(backend):
    """For torch.compile: as quick as a backend that does not compile."""
    compile = torch.compile
    return lambda step, **options: compile(step, backend=backend, **options)


def test_a_compiled_step_is_the_plain_one_and_says_what_it_took(monkeypatch, capfd):
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    check_speed_up(random_model(GPT), True, compile=True)
    assert capfd.readouterr().err.count("compiled in") == 1


def test_models_that_differ_in_a_number_alone_are_compiled_each(monkeypatch):
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    torch.compiler.reset()
    idx = torch.randint(97, (1, 12))
    for eps in (1e-5, 1.0):
        model = random_model(GPT)
        model.ln_f.eps = eps
        expected = steps(model, idx, None)
        fast = speed_up(model, compile=True)
        torch.testing.assert_close(steps(fast, idx, None), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model_class", [GPT, pytest.param(changed_gpt, marks=[pytest.mark.slow, pytest.mark.gpt2])]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_blocks_of_a_wide_model_are_compiled_each_and_stay_what_they_are(
    model_class, dtype, monkeypatch
):
    """Blocks that differ, too, and without instructions for 16 bits; and a call without a cache
    keeps its mask."""
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    monkeypatch.setattr("gptling.decoding.has_fast_matmul", lambda dtype: dtype == torch.float32)
    model = random_model(model_class, n_embd=256, n_layer=3).to(dtype)
    model.h[1] = random_model(model_class, n_embd=256, n_layer=1, n_head=4).to(dtype).h[0]
    idx, mask = torch.randint(97, (2, 12)), torch.arange(12) >= torch.tensor([[0], [3]])
    expected, _ = model(idx, padding_mask=mask)
    fast = check_speed_up(model, True, compile=True)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    atol = tolerance * expected.abs().max().item()
    torch.testing.assert_close(fast(idx, padding_mask=mask)[0], expected, rtol=0, atol=atol)
    one = torch.randint(97, (1, 1))
    assert fast(one)[0].shape == (1, 1, 97)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["mlp", "mlp.c_proj"])
def test_a_hook_in_one_block_stays_in_it(name, compile, monkeypatch):
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    model = random_model(GPT, n_embd=256, n_layer=3)
    model.h[1].get_submodule(name).register_forward_hook(lambda module, arguments, y: 2 * y)
    check_speed_up(model, False, compile=compile)


def test_a_compiler_that_fails_is_one_line(monkeypatch):
    def no_compiler(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch.compile", compile_by(no_compiler))
    with pytest.raises(UserError, match=r"^--compile: .*; leave it out, or install a compiler"):
        check_speed_up(random_model(GPT), False, compile=True)


def test_weights_of_replaced_layers_are_let_go_after_the_first_steps():
    model = random_model(GPT, n_embd=256)
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    weights = [weakref.ref(layer.weight) for layer in layers if layer is not model.lm_head]
    del layers
    model = speed_up(model)
    steps(model, torch.randint(97, (1, 12)))
    gc.collect()
    gone = [weight() is None for weight in weights]
    assert all(gone) or not torch.backends.mkldnn.is_available()


def test_layers_that_are_not_understood_stay_as_they_are():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = random_model(GPT, n_embd=256)
    model.lm_head = Doubled(256, 97)
    assert type(check_speed_up(model, False).lm_head) is Doubled


def test_faster_layers_whose_logits_are_no_numbers_are_left_out(monkeypatch, capsys):
    forward = decoding.OneDNNLinear.forward
    monkeypatch.setattr(decoding.OneDNNLinear, "forward", lambda *a: forward(*a) * math.nan)
    monkeypatch.setattr(decoding, "has_fast_matmul", lambda dtype: True)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    model, idx = random_model(GPT, n_embd=256), torch.randint(97, (1, 8))
    expected = torch.cat(list(model.generate(idx, 5, temperature=0.0)))
    assert torch.equal(torch.cat(list(speed_up(model).generate(idx, 5, temperature=0.0))), expected)
    assert "the fast one gives other logits, by inf" in capsys.readouterr().err


@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("wrong", ["prompt", "token", "compiled token"])
def test_faster_layers_that_compute_something_else_are_left_out(wrong, length, monkeypatch, capsys):
    """Before the first token; and the text is that of the plain model."""
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    layer = "RowLinear" if "compiled" in wrong else "OneDNNLinear"
    layer = getattr(decoding, layer)
    forward = layer.forward

    def other_forward(self, x):
        rows = x.numel() // x.size(-1)
        compiled = wrong == "compiled token" and torch.compiler.is_compiling()
        is_wrong = compiled or (wrong == "prompt") == (rows > 1)
        return forward(self, x) * (1.1 if is_wrong else 1.0)

    monkeypatch.setattr(layer, "forward", other_forward)
    monkeypatch.setattr(decoding, "has_fast_matmul", lambda dtype: True)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    model = random_model(GPT, n_embd=256)
    idx = torch.randint(97, (1, length))
    options = {"temperature": 0.0}
    expected = torch.cat(list(model.generate(idx, 50, **options)))  # past the window
    fast = speed_up(model, compile="compiled" in wrong)
    assert torch.equal(torch.cat(list(fast.generate(idx, 50, **options))), expected)
    assert capsys.readouterr().err.count("the fast one gives other logits") == 1
    assert torch.equal(torch.cat(list(fast.generate(idx, 50, **options))), expected)


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_models_of_the_shortest_sequences_are_sped_up(block_size):
    model, idx = random_model(GPT, n_embd=256, block_size=block_size), torch.randint(97, (2, 1))
    expected = torch.cat(list(model.generate(idx, 9, temperature=0.0)))
    assert torch.equal(torch.cat(list(speed_up(model).generate(idx, 9, temperature=0.0))), expected)


@pytest.mark.parametrize("compile", [False, True])
def test_a_hook_that_only_looks_on_is_called(compile, monkeypatch):
    """It changes no logits, so that no comparison would miss it."""
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    model, seen = random_model(GPT, n_embd=256, n_layer=3), {}

    def look(module, arguments, y):
        seen[y.size(1)] = y.size(2)

    model.h[1].mlp.c_fc.register_forward_hook(look)
    fast = check_speed_up(model, False, compile=compile)
    seen.clear()
    steps(fast, torch.randint(97, (1, 12)))
    assert seen == {8: 1024, 1: 1024}


@pytest.mark.parametrize("padded", [False, True])
def test_a_graph_of_a_step_changes_no_text(padded, monkeypatch):
    """On a CPU, with a graph that does again what was captured. A GPU's: tests/test_gpu.py."""
    replays = []

    class Graph:
        def replay(self):
            replays.append(1)
            step = fast_step
            step.visible.index_fill_(1, step.slot, True)
            step.logits.copy_(step.plain(step.idx, step.visible, step.static))

    for name in ("graph", "stream"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    model, idx = random_model(GPT), torch.randint(97, (3, 8))
    mask = torch.arange(8) >= torch.tensor([[0], [3], [7]]) if padded else None
    options = {"temperature": 0.0, "padding_mask": mask}
    expected = torch.stack(list(model.generate(idx, 100, **options)))  # past the window
    fast = copy.deepcopy(model)
    fast_step = GraphedStep(fast, compile=False)
    fast.next_logits = fast_step
    fast.next_logits = decoding.verified(fast, model)
    for _ in range(2):
        assert torch.equal(torch.stack(list(fast.generate(idx, 100, **options))), expected)
    assert len(replays) > 160 and fast.next_logits is fast_step


@pytest.mark.slow
def test_compiling_changes_no_text_and_says_what_it_took(trained, tmp_path):
    """Past block_size too, where the cache is built anew."""
    arguments = ["out/mine", "--dtype=float32", "--max_new_tokens=40"]
    text = output_of("sample.py", *arguments, cwd=trained)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = run_script("sample.py", *arguments, "--compile", cwd=trained, **cache)
    assert process.returncode == 0 and process.stdout.decode() == text
    assert b"compiled in" in process.stderr


@pytest.mark.slow
def test_compiling_without_a_compiler_is_one_line(trained, tmp_path):
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "CXX": "/nonexistent"}
    process = run_script("sample.py", "out/mine", "--compile", cwd=trained, **caches)
    *_, error = process.stderr.decode().splitlines()
    assert process.returncode == 1 and "--compile" in error and "Traceback" not in error


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


def test_text_is_held_back_only_while_a_stop_text_may_begin_with_it():
    sample, seen = Sample("A ", [1], ["END"]), []
    for raw in (b"caf\xc3", b"\xa9 E", b"Nte EN", b"D!"):
        sample.feed(raw)
        seen.append(sample.unprinted)
    assert seen == ["A caf", "A café ", "A café ENte ", "A café ENte "] and sample.ended


def test_bytes_that_are_no_text_are_replaced():
    sample = Sample("", [])
    sample.feed(b"a\xff\xe4")
    sample.feed(b"", final=True)
    assert sample.unprinted == "a\ufffd\ufffd"


def test_ctrl_c_ends_a_text_and_not_the_conversation(trained, monkeypatch):
    """A second prompt is completed after it."""
    import sample

    whole = sample.write_samples

    def interrupted(model, tokenizer, prompts, config):
        if prompts == ["12 green"]:
            model.new_cache = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # in its first call
        else:
            vars(model).pop("new_cache", None)
        return whole(model, tokenizer, prompts, config)

    monkeypatch.setattr(sample, "write_samples", interrupted)
    arguments = ["out/mine", "--interactive", "--max_new_tokens=3"]
    process = run_here("sample.py", *arguments, cwd=trained, stdin="12 green\n7 green\n\n")
    assert process.returncode == 0 and b"\n7 green" in b"\n" + process.stdout.split(b"12 green")[1]

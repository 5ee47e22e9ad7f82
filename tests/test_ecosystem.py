"""GPT-2 in, and our checkpoints out to other people's programs: the recipes of docs/ as they stand,
and greedy text equal to ours token for token."""

import contextlib
import io
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch

from gptling.gpt2_format import load, save
from gptling.run import best_of, list_models
from gptling.tokenizers import build_tokenizer, encode, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from prepare import PrepareConfig, prepare
from tests.scripts import ROOT, output_of, run_script
from tests.test_mistakes import Evil
from tests.try_model import generate

transformers = pytest.importorskip("transformers", reason="pip install -e '.[test]'")
pytestmark = pytest.mark.gpt2
TEXT = "".join(f"{n} green bottles, a café in 中国 🙂\n" for n in range(300))
PROMPT = "12 green"
N = 24  # greedy tokens
DOCS = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
CHECKPOINT = "out/mine/checkpoint-500"  # as it is called there


def needs(*packages):
    for name in packages:
        pytest.importorskip(name, reason=f"pip install -e '.[tools]' brings {name}")


def block(kind, word):
    """The block of docs/export.md in the language `kind` that has `word` in it."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if word in text]
    return found


def run_block(code, cwd):
    """What a block of Python prints, run as a file in the directory `cwd`."""
    (cwd / "block.py").write_text(code, encoding="utf-8")
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path("block.py")
    return printed.getvalue()


def learn(tokenizer, path, multiple=1):
    """Train a tiny model, until its greedy tokens are likelier than the next by what programs
    with other arithmetic differ."""
    torch.manual_seed(0)
    vocab_size = math.ceil(tokenizer.n_vocab / multiple) * multiple
    sizes = {"block_size": 48, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(vocab_size=vocab_size, bias=multiple == 1, **sizes))
    ids = torch.from_numpy(encode(tokenizer, TEXT).astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    B, steps = (8, 200) if vocab_size < 1000 else (2, 100)
    for _ in range(steps):
        sequences = torch.stack([ids[i : i + 33] for i in torch.randint(len(ids) - 33, (B,))])
        model(sequences[:, :-1], sequences[:, 1:])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    save(model, path, tokenizer_to_json(tokenizer))


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory with CHECKPOINT: of characters without end-of-text, with a padded vocabulary and
    without biases."""
    directory = tmp_path_factory.mktemp("place")
    tokenizer = build_tokenizer("char", set(TEXT), end_of_text=False)
    learn(tokenizer, directory / CHECKPOINT, multiple=128)
    return directory


@pytest.fixture(scope="session", params=["mine", "byte", "bpe", "gpt2"])
def checkpoint(request, place):
    """One checkpoint after another: that of `place`, and others with end-of-text and biases."""
    name = request.param
    path = place / CHECKPOINT.replace("mine", name)
    if name == "gpt2":
        learn(request.getfixturevalue("gpt2_encoding"), path)
    elif name != "mine":
        learn(build_tokenizer(name, [TEXT], 300 if name == "bpe" else 0), path)
    return path


@pytest.fixture(scope="session")
def portable(place):
    """out/mine with an end-of-text token and without padding, made by the recipe; and what the
    recipe for CTranslate2 printed then."""
    needs("ctranslate2")
    run_block(block("python", "resize_token_embeddings"), place)
    return place / "portable", run_block(block("python", "ctranslate2"), place)


def greedy(path):
    """Prompt and continuation of our own model: ids, ids and text."""
    model, tokenizer = load(GPT, path), load_tokenizer(path)
    ids = tokenizer.encode_ordinary(PROMPT)
    new = generate(model, [ids], N, temperature=0)[0].tolist()
    return ids, new, tokenizer.decode(ids + new)


# ---------------------------------------------------------------------------- out
@pytest.mark.slow
def test_transformers_goes_on_as_we_do(checkpoint):
    ids, _, text = greedy(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer(PROMPT)["input_ids"] == ids
    for sample in (TEXT[:500], "  \n 12 \t"):
        if checkpoint.parent.name != "mine" or set(sample) <= set(TEXT):
            assert tokenizer(sample)["input_ids"] == load_tokenizer(checkpoint).encode(sample)
    pipeline = transformers.pipeline("text-generation", model=str(checkpoint))
    result = pipeline(PROMPT, max_new_tokens=N, do_sample=False, max_length=None)
    assert result[0]["generated_text"] == text


@pytest.mark.slow
def test_ctranslate2_and_its_recipe_go_on_as_we_do(checkpoint, portable, tmp_path):
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    directory, printed = portable
    direct = checkpoint.parent.name != "mine"  # which lacks end-of-text and is padded
    TransformersConverter(str(checkpoint if direct else directory)).convert(str(tmp_path / "ct2"))
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), intra_threads=1)
    prompt = transformers.AutoTokenizer.from_pretrained(checkpoint).tokenize(PROMPT)
    result = generator.generate_batch([prompt], max_length=N, include_prompt_in_result=False)
    assert result[0].sequences_ids[0] == greedy(checkpoint)[1]
    assert greedy(directory)[2].startswith(PROMPT + printed[:-1]) and len(printed) == 21


@pytest.mark.slow
def test_mlx_lm_goes_on_as_we_do(checkpoint):
    needs("mlx_lm")
    import mlx_lm

    model, tokenizer = mlx_lm.load(str(checkpoint))
    parts = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=N)
    assert [part.token for part in parts] == greedy(checkpoint)[1]


@pytest.mark.slow
def test_lm_evaluation_harness_measures_our_bits_per_byte(place):
    needs("lm_eval", "accelerate")
    texts = [TEXT[:31], TEXT[40:70], "café"]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (place / "mine.jsonl").write_text("".join(lines), encoding="utf-8")
    (place / "mine.yaml").write_text(block("yaml", "bits_per_byte"), encoding="utf-8")
    command = [sys.executable, "-m", *shlex.split(block("sh", "lm_eval").replace("\\\n", " "))]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=place, env=os.environ | offline, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
    (file,) = (place / "results").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["mine"]["bits_per_byte,none"]
    path = place / CHECKPOINT
    model, tokenizer = load(GPT, path), load_tokenizer(path)
    nats = 0.0
    for text in texts:
        ids = torch.tensor([tokenizer.encode_ordinary("\n" + text)])
        nats += model(ids[:, :-1], ids[:, 1:])[1].item() * (ids.size(1) - 1)
    ours = nats / math.log(2) / sum(len(text.encode()) for text in texts)
    assert theirs == pytest.approx(ours, abs=1e-4)


@pytest.mark.slow
def test_onnx_gives_our_logits_for_any_batch_and_length(place):
    needs("onnxscript", "onnxruntime")
    import onnxruntime

    output_of("docs/to_onnx.py", CHECKPOINT, "mine.onnx", cwd=place)
    session = onnxruntime.InferenceSession(place / "mine.onnx", providers=["CPUExecutionProvider"])
    model = load(GPT, place / CHECKPOINT)
    for B, T in ((1, 1), (1, 48), (3, 17)):
        idx = torch.randint(30, (B, T))
        logits = session.run(None, {"idx": idx.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(logits), model(idx)[0], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_llama_cpp_goes_on_as_we_do(checkpoint, tmp_path):
    needs("gguf", "xllamacpp")
    import xllamacpp

    file = tmp_path / "mine.gguf"
    output_of("docs/to_gguf.py", checkpoint, file, cwd=tmp_path)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(file), 48, 1
    params.warmup, params.verbosity, params.cpuparams.n_threads = False, 0, 1
    server = xllamacpp.Server(params)

    def post(path, **body):
        header = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.listening_address + path, data, header)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["tokens"]

    tokenizer = load_tokenizer(checkpoint)
    samples = [TEXT[:300], PROMPT]
    if checkpoint.parent.name != "mine":
        samples += ["It's  12345 x=1;\r\n\n  naïve ½ здра́вствуй \n", "<|endoftext|> \t 'LL don't"]
    for text in samples:
        ids = tokenizer.encode_ordinary(text)
        assert post("/tokenize", content=text, parse_special=False) == ids
    theirs = post("/completion", prompt=PROMPT, n_predict=N, temperature=0, return_tokens=True)
    assert theirs == greedy(checkpoint)[1]


def test_q8_0_keeps_the_weights_within_one_percent(tmp_path):
    needs("gguf")
    import gguf

    for C in (48, 64):
        model = GPT(GPTConfig(vocab_size=257, block_size=16, n_layer=1, n_head=2, n_embd=C))
        save(model, tmp_path / f"{C}", tokenizer_to_json(build_tokenizer("byte")))
    failed = run_script("docs/to_gguf.py", "48", "mine.gguf", "--type=q8_0", cwd=tmp_path)
    assert failed.returncode == 1 and b"divisible by 32, not 48" in failed.stderr
    output_of("docs/to_gguf.py", "64", "mine.gguf", "--type=q8_0", cwd=tmp_path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "mine.gguf").tensors}
    weights = {"token_embd": model.wte, "position_embd": model.wpe, "output_norm": model.ln_f}
    weights |= {"blk.0.attn_qkv": model.h[0].attn.c_attn, "blk.0.ffn_down": model.h[0].mlp.c_proj}
    for name, module in weights.items():
        weight = module.weight.detach().numpy()
        tensor = tensors[f"{name}.weight"]
        assert (tensor.tensor_type.name == "Q8_0") == (name not in ("position_embd", "output_norm"))
        error = gguf.dequantize(tensor.data, tensor.tensor_type) - weight
        assert np.linalg.norm(error) < 0.01 * np.linalg.norm(weight)


# ---------------------------------------------------------------------------- GPT-2 in
@pytest.mark.slow
def test_gpt2_is_finetuned_from_where_its_files_were_put(tmp_path, gpt2_encoding, monkeypatch):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=64, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer = tokenizer_to_json(gpt2_encoding)
    (tmp_path / "gpt2" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    (tmp_path / "mine.txt").write_text(TEXT[:5000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    prepare(PrepareConfig(("mine.txt",), tokenizer="gpt2", name="mine_gpt2"))
    preset = ROOT / "config" / "finetune_gpt2.toml"
    small = "--block_size=32 --max_iters=2 --eval_tokens=64 --gradient_accumulation_steps=2".split()
    assert "step 2/2" in output_of("train.py", preset, *small, cwd=tmp_path)
    best = best_of(list_models("out/finetune_gpt2"))
    assert load_tokenizer(best).n_vocab == load_tokenizer("gpt2").n_vocab == 50257
    assert load(GPT, best).config == load(GPT, "gpt2").config
    text = output_of("sample.py", "gpt2", "--prompt=12 green", "--max_new_tokens=9", cwd=tmp_path)
    assert text.startswith("12 green") and len(text) > 20


def test_a_checkpoint_of_nanogpt_becomes_one_of_ours(here):
    """With the names of a compiled nanoGPT, its output layer, and its mask."""
    n_vocab = load_tokenizer(here / "data/mine").n_vocab
    sizes = dict(block_size=16, vocab_size=n_vocab, n_layer=2, n_head=2, n_embd=8)
    model = GPT(GPTConfig(**sizes, bias=False)).eval()
    weights = {f"transformer.{n}": t for n, t in model.state_dict().items() if n[:2] != "lm"}
    weights |= {"lm_head.weight": model.wte.weight, "transformer.h.0.attn.bias": torch.ones(1)}
    checkpoint = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": sizes | {"bias": False, "dropout": 0.0},
        "best_val_loss": torch.tensor(1.5),
    }
    torch.save(checkpoint, here / "ckpt.pt")
    output_of("docs/from_nanogpt.py", "ckpt.pt", "out/nano", "data/mine", cwd=here)
    idx = torch.randint(n_vocab, (2, 16))
    torch.testing.assert_close(load(GPT, here / "out/nano")(idx)[0], model(idx)[0])
    assert output_of("sample.py", "out/nano", "--max_new_tokens=5", cwd=here)
    torch.save({"model": Evil()}, here / "ckpt.pt")
    assert run_script("docs/from_nanogpt.py", "ckpt.pt", "out/evil", cwd=here).returncode == 1
    assert not (here / "ran").exists()  # its code

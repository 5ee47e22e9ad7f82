"""How fast text is drawn: tokens per second and the time to the first, one prompt and many.

    python tests/benchmarks/sample.py               # all, about 15 minutes on two cores
    python tests/benchmarks/sample.py prompt small batch

Weights are random. The rows of other programs need pip install -e '.[bench]'.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from report import ROOT, compare, dtypes, gpt2_of_transformers, main

SIZES = {"0.8 M": dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128), "124 M": {}}


def gptling(case: dict, model, idx):
    """Return a function that draws n tokens; likewise below."""
    from gptling.decoding import speed_up

    with torch.inference_mode():
        model = speed_up(model, rows=len(idx))
    generators = [torch.Generator(idx.device).manual_seed(i) for i in range(len(idx))]
    options = {"temperature": 0.8, "top_k": 200, "generator": generators}

    @torch.inference_mode()
    def generate(n):
        for token in model.generate(idx, n, **options):
            token.tolist()

    return generate


def transformers(case: dict, model, idx):
    peer = gpt2_of_transformers(model.config).eval().to(idx.device, model.wte.weight.dtype)
    options = {"do_sample": True, "top_k": min(200, model.config.vocab_size), "temperature": 0.8}
    options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(idx)}
    return lambda n: peer.generate(idx, max_new_tokens=n, min_new_tokens=n, **options)


def save_gpt2(model, directory: str):
    import tiktoken

    from gptling.gpt2_format import save
    from gptling.tokenizers import tokenizer_to_json

    save(model, directory, tokenizer_to_json(tiktoken.get_encoding("gpt2")))


def ctranslate2(case: dict, model, idx):
    import ctranslate2

    with tempfile.TemporaryDirectory() as directory:
        save_gpt2(model, f"{directory}/hf")
        converter = ctranslate2.converters.TransformersConverter(f"{directory}/hf")
        converter.convert(f"{directory}/ct2", quantization=case.get("type", case["dtype"]))
        vocabulary = json.loads(Path(f"{directory}/ct2/vocabulary.json").read_text())
        threads = torch.get_num_threads()
        generator = ctranslate2.Generator(f"{directory}/ct2", intra_threads=threads)
    prompt = [vocabulary[i] for i in idx[0].tolist()]
    options = {"sampling_topk": 200, "sampling_temperature": 0.8}
    return lambda n: generator.generate_batch([prompt], max_length=n, min_length=n, **options)


def llama_cpp(case: dict, model, idx):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.n_ctx, params.n_parallel, params.verbosity = model.config.block_size, 1, 0
    params.cpuparams.n_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as directory:
        save_gpt2(model, directory)
        params.model.path = f"{directory}/gguf"
        command = [sys.executable, ROOT / "docs/to_gguf.py", directory, params.model.path]
        command += [f"--type={case['type']}"] if "type" in case else []
        subprocess.run(command, check=True)
        server = xllamacpp.Server(params)
    options = {"top_k": 200, "temperature": 0.8, "samplers": ["top_k", "temperature"]}
    options |= {"prompt": idx[0].tolist(), "ignore_eos": True, "cache_prompt": False}
    return lambda n: server.handle_completions(options | {"n_predict": n})


def worker(case: dict):
    """Draw texts; prints milliseconds to the first token and tokens per second after it as JSON."""
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(**SIZES[case["size"]])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(config).eval().to(device, getattr(torch, case["dtype"]))
    B, n = case.get("batch", 1), case["tokens"]
    idx = torch.randint(config.vocab_size, (B, case["prompt"]), device=device)
    start = time.perf_counter()
    peers = {peer.__name__: peer for peer in (gptling, transformers, ctranslate2, llama_cpp)}
    generate = peers[case["who"]](case, model, idx)
    generate(n)  # warms up
    result = {"ready": time.perf_counter() - start}
    seconds = {1: [], n: []}
    for tokens in [1, n] * 3:
        start = time.perf_counter()
        generate(tokens)
        seconds[tokens].append(time.perf_counter() - start)
    first, whole = map(statistics.median, seconds.values())
    print(json.dumps(result | {"first": 1000 * first, "rate": B * (n - 1) / (whole - first)}))


def draw(title: str, repetitions: int, cases: dict[str, dict], **common):
    """A table of cases, each against the first."""
    cases = {name: {"who": "gptling"} | common | case for name, case in cases.items()}
    columns = {"tokens/s": ("rate", 0), "against the first": ("rate", 2)}
    columns |= {"ms to the first token": ("first", 0), "ready after, s": ("ready", 1)}
    compare(__file__, title, cases, repetitions, columns)


def prompt(repetitions: int):
    for length, dtype in product((1, 512), dtypes()):
        cases = {"transformers": {"who": "transformers"}, "gptling": {}}
        if dtype == "float32":
            cases["CTranslate2"] = {"who": "ctranslate2"}
            cases["CTranslate2, int8"] = {"who": "ctranslate2", "type": "int8"}
            cases["llama.cpp"] = {"who": "llama_cpp"}
            cases["llama.cpp, q8_0"] = {"who": "llama_cpp", "type": "q8_0"}
        title, sizes = f"124 M, {dtype}, one prompt of {length}, 64 tokens", {"prompt": length}
        draw(title, repetitions, cases, size="124 M", tokens=64, dtype=dtype, **sizes)


def small(repetitions: int):
    cases = {"transformers": {"who": "transformers"}, "gptling": {}}
    title, sizes = "0.8 M, float32, 63 tokens", {"prompt": 1, "tokens": 63}
    draw(title, repetitions, cases, size="0.8 M", dtype="float32", **sizes)


def batch(repetitions: int):
    cases = {"1 prompt": {"batch": 1}, "16 prompts": {}}
    cases["transformers, 16 prompts"] = {"who": "transformers"}
    title, sizes = f"124 M, {dtypes()[-1]}, prompts of 8", {"prompt": 8, "tokens": 64, "batch": 16}
    draw(title, repetitions, cases, size="124 M", dtype=dtypes()[-1], **sizes)


if __name__ == "__main__":
    main(worker, {"prompt": prompt, "small": small, "batch": batch})

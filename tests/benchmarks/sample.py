"""How fast text is drawn: tokens per second and the time to the first, one prompt and many.

    python tests/benchmarks/sample.py               # all, about 15 minutes on two cores
    python tests/benchmarks/sample.py prompt small batch length

Weights are random. The rows of transformers and CTranslate2 need pip install -e '.[bench]'.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from report import dtypes, in_turns, machine, spread, table

SIZES = {
    "0.8 M": dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128),
    "124 M": dict(),
}


def worker(case: dict):
    """Draw texts; prints seconds to the first token and tokens per second after it as JSON."""
    import torch

    from model import GPT, GPTConfig

    torch.manual_seed(0)
    config = GPTConfig(**SIZES[case["size"]])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case["dtype"])
    B, n = case.get("batch", 1), case["tokens"]
    idx = torch.randint(config.vocab_size, (B, case["prompt"]), device=device)
    drawn = []  # when each token of all rows was there

    if case["who"] == "gptling":
        from gptling.decoding import speed_up

        model = speed_up(GPT(config).eval().to(device, dtype), case.get("compile", False))
        generators = [torch.Generator(device).manual_seed(i) for i in range(B)]

        @torch.inference_mode()
        def generate():
            options = {"temperature": 0.8, "top_k": 200, "generator": generators}
            for token in model.generate(idx, n, **options):
                token.tolist()
                drawn.append(time.perf_counter())
    elif case["who"] == "transformers":
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.generation.streamers import BaseStreamer

        gpt2_config = GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd,
            n_layer=config.n_layer, n_head=config.n_head, bos_token_id=0, eos_token_id=None,
        )  # fmt: skip
        model = GPT2LMHeadModel(gpt2_config).eval().to(device, dtype)

        class Clock(BaseStreamer):
            def put(self, value):
                drawn.append(time.perf_counter())

            def end(self):
                pass

        def generate():
            top_k = min(200, config.vocab_size)
            options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": True, "top_k": top_k}
            options |= {"temperature": 0.8, "pad_token_id": 0}
            clock = Clock() if B == 1 else None  # its streamers take one row
            mask = torch.ones_like(idx)
            model.generate(idx, attention_mask=mask, streamer=clock, **options)
            if clock:
                drawn.pop(0)  # the prompt
            else:
                drawn.extend([start, time.perf_counter()])  # no time to the first
    else:
        import ctranslate2
        import tiktoken

        from gptling.gpt2_format import save
        from gptling.tokenizers import tokenizer_to_json

        with tempfile.TemporaryDirectory() as directory:
            gpt2 = tokenizer_to_json(tiktoken.get_encoding("gpt2"))
            save(GPT(config), f"{directory}/hf", gpt2)
            converter = ctranslate2.converters.TransformersConverter(f"{directory}/hf")
            converter.convert(f"{directory}/ct2", quantization=case["dtype"])
            vocabulary = json.loads(Path(f"{directory}/ct2/vocabulary.json").read_text())
            threads = torch.get_num_threads()
            generator = ctranslate2.Generator(f"{directory}/ct2", intra_threads=threads)
        prompt = [vocabulary[i] for i in idx[0].tolist()]

        def generate():
            options = {"max_length": n, "min_length": n, "sampling_topk": 200}
            for _ in generator.generate_tokens(prompt, sampling_temperature=0.8, **options):
                drawn.append(time.perf_counter())

    start = time.perf_counter()
    generate()  # compiles, and warms up
    warm_up = time.perf_counter() - start
    first, rate = [], []
    for _ in range(3):
        drawn.clear()
        start = time.perf_counter()
        generate()
        first.append(drawn[0] - start)
        if B == 1:
            rate.append((len(drawn) - 1) / (drawn[-1] - drawn[0]))
        else:  # with the prompts: the peer tells no single tokens
            rate.append(B * n / (drawn[-1] - start))
    result = {"first": statistics.median(first), "rate": statistics.median(rate)}
    print(json.dumps(result | {"warm_up": warm_up}))


def compare(title: str, cases: dict[str, dict], repetitions: int, base: dict[str, str]):
    """A table of cases; `base` names the case that each is compared with."""
    results = in_turns(__file__, cases, repetitions)
    rows = []
    for name, found in results.items():
        other = results.get(base.get(name, ""), [])
        ratio = [a["rate"] / b["rate"] for a, b in zip(found, other, strict=False)]
        first = [1000 * a["first"] for a in found]
        cells = [spread([a["rate"] for a in found]), spread(ratio, 2) if ratio else ""]
        cells += [spread(first) if all(first) else "", spread([a["warm_up"] for a in found], 1)]
        rows.append([name, *cells])
    header = ["", "tokens/s", "against its base", "ms to the first token", "first call, s"]
    table(f"{title}; {repetitions} repetitions (median, low, high)", header, rows)


def prompt(repetitions: int):
    for length in (1, 512):
        common = dict(size="124 M", prompt=length, tokens=64)
        cases, base = {}, {}
        for dtype in dtypes():
            peer = f"transformers, {dtype}"
            cases[peer] = common | dict(who="transformers", dtype=dtype)
            for compile in (False, True):
                name = f"gptling, {dtype}{', --compile' * compile}"
                cases[name] = common | dict(who="gptling", dtype=dtype, compile=compile)
                base[name] = peer
        stored = "gptling, bfloat16, --compile"  # also where matmuls are in float32
        cases[stored] = common | dict(who="gptling", dtype="bfloat16", compile=True)
        base.setdefault(stored, "transformers, float32")
        cases["CTranslate2, float32"] = common | dict(who="ctranslate2", dtype="float32")
        compare(f"124 M, one prompt of {length}, 64 tokens", cases, repetitions, base)


def small(repetitions: int):
    common = dict(size="0.8 M", prompt=1, tokens=63, dtype="float32")
    cases = {
        "transformers": common | dict(who="transformers"),
        "gptling": common | dict(who="gptling"),
        "gptling, --compile": common | dict(who="gptling", compile=True),
    }
    base = dict.fromkeys(list(cases)[1:], "transformers")
    compare("0.8 M, float32, 63 tokens", cases, repetitions, base)


def batch(repetitions: int):
    common = dict(size="124 M", prompt=8, tokens=64, dtype=dtypes()[-1])
    cases = {
        "gptling, 1 prompt": common | dict(who="gptling"),
        "gptling, 16 prompts": common | dict(who="gptling", batch=16),
        "gptling, 16 prompts, --compile": common | dict(who="gptling", batch=16, compile=True),
        "transformers, 16 prompts": common | dict(who="transformers", batch=16),
    }
    base = dict.fromkeys(list(cases)[1:], "gptling, 1 prompt")
    compare(f"124 M, {dtypes()[-1]}, prompts of 8", cases, repetitions, base)


def length(repetitions: int):
    common = dict(size="124 M", prompt=1, dtype=dtypes()[-1], who="gptling")
    cases = {f"the first {n} tokens": common | dict(tokens=n) for n in (64, 256, 1000)}
    base = dict.fromkeys(list(cases)[1:], "the first 64 tokens")
    compare(f"124 M, {dtypes()[-1]}, longer texts", cases, repetitions, base)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-1]))
        sys.exit()
    print(machine())
    parts = {"prompt": prompt, "small": small, "batch": batch, "length": length}
    repetitions = next((int(word) for word in sys.argv[1:] if word.isdigit()), 3)
    with tempfile.TemporaryDirectory() as cache:  # the first turn compiles, the others read it
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        for name in [word for word in sys.argv[1:] if not word.isdigit()] or parts:
            parts[name](repetitions)

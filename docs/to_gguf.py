"""For llama.cpp, Ollama, LM Studio: python docs/to_gguf.py out/mine mine.gguf [--type=q8_0]

The first word is a run, a checkpoint, or the hub name of a GPT-2. Weights are in float32, or in
q8_0: 8-bit integers with a scale for each block of 32."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import regex
from gguf import GGMLQuantizationType, LlamaFileType

sys.path.insert(0, str(Path(__file__).parents[1]))
from gptling.cli import UserError, launch
from gptling.files import read_json
from gptling.gpt2_format import published_tensors
from gptling.pretrained import find_checkpoint, load_model
from gptling.tokenizers import END_OF_TEXT, load_tokenizer, to_bytes, tokenizer_to_json
from model import GPT

# llama.cpp has its own split patterns: a part that only this pattern has, and its name there.
SPLITS = {r"\p{Lu}": "gpt-4o", r"\p{M}": "k2-horizon", r"\p{N}{1,3}": "llama-bpe"}
SPLITS |= {r" ?\p{N}+": "gpt-2", r"[\s\S]": "gpt-2"}
MARKS = r"[\p{M}\u200C\u200D]"  # what k2-horizon counts as letters, and llama-bpe does not


def find_split(pattern: str, vocab: dict) -> str | None:
    """The name of a pattern. Older llama.cpp does not know k2-horizon, so it is used only if tokens
    have marks."""
    split = next((name for part, name in SPLITS.items() if part in pattern), None)
    if split == "k2-horizon":
        text = " ".join(to_bytes(token).decode(errors="ignore") for token in vocab)
        return split if regex.search(MARKS, text) else "llama-bpe"
    return split


def main():
    source = find_checkpoint(sys.argv[1])
    model_type = read_json(source / "config.json")["model_type"]
    if model_type != "gpt2":
        raise UserError(f"{source}: its architecture is {model_type}, which is not GPT-2's")
    model = load_model(GPT, source)
    C = model.config.n_embd
    is_q8_0 = "--type=q8_0" in sys.argv
    if is_q8_0 and C % 32:
        raise UserError(f"{source}: --type=q8_0 needs an n_embd divisible by 32, not {C}")
    tensors = published_tensors(model)
    weights = {name: tensor.numpy() for name, tensor in tensors.items()}
    tokenizer = json.loads(tokenizer_to_json(load_tokenizer(source)))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab = {t: id for t, id in tokenizer["model"]["vocab"].items() if t not in special}
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    if not merges:  # char puts a character together byte by byte; byte needs none, llama.cpp one
        merges = [f"{t[:i]} {t[i]}" for t in vocab for i in range(1, len(t))]
        merges = merges or [f"{END_OF_TEXT} {END_OF_TEXT}"]
    pattern = tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    split = find_split(pattern, vocab)
    if split is None:
        raise UserError(f"{source}: llama.cpp has no pattern like {pattern}")
    names = {id: token for token, id in (vocab | special).items()}
    wte = weights["wte.weight"][: max(names) + 1]  # without what pads the vocabulary
    if END_OF_TEXT not in names.values():  # llama.cpp would end at token 11
        names[len(wte)] = END_OF_TEXT
        wte = np.vstack([wte, wte.mean(axis=0)])  # its logit is the mean: never the highest
    tokens = [names.get(id, f"[unused {id}]") for id in range(len(wte))]
    end = tokens.index(END_OF_TEXT)
    fields = dict(
        block_count=model.config.n_layer, context_length=model.config.block_size,
        embedding_length=C, feed_forward_length=4 * C, head_count=model.config.n_head,
        layer_norm_eps=1e-5, tokenizer_model="gpt2", tokenizer_pre=split,
        token_types=[1 if token in vocab else 3 for token in tokens],  # normal, control
        token_list=tokens, token_merges=merges, bos_token_id=end, eos_token_id=end,
        add_bos_token=False,
        file_type=LlamaFileType.MOSTLY_Q8_0 if is_q8_0 else LlamaFileType.ALL_F32,
    )  # fmt: skip
    writer = gguf.GGUFWriter(sys.argv[2], "gpt2")
    for name in fields:
        getattr(writer, f"add_{name}")(fields[name])
    their = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, model.config.n_layer)
    for name, tensor in (weights | {"wte.weight": wte}).items():
        tensor = tensor.T if name[:2] == "h." and tensor.ndim == 2 else tensor  # Conv1D's
        is_matrix = tensor.ndim == 2 and name != "wpe.weight"  # llama.cpp adds wpe in float32
        dtype = GGMLQuantizationType.Q8_0 if is_q8_0 and is_matrix else GGMLQuantizationType.F32
        their_name = their.get_name(f"transformer.{name}", (".weight", ".bias"))
        writer.add_tensor(their_name, gguf.quantize(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3 and sys.argv[3:] != ["--type=q8_0"]:
        sys.exit(__doc__)
    launch(main)

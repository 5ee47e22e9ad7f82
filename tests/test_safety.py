"""No file of a stranger runs code, and imports go one way."""

import ast
import json
import os

import numpy as np
import pytest
import torch

from gptling.dataset import open_tokens
from gptling.gpt2_format import save
from gptling.pretrained import load_model
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import ROOT

PACKAGE = sorted((ROOT / "gptling").glob("*.py"))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_nothing_in_a_directory_is_executed(tmp_path, monkeypatch):
    """Neither what transformers would run with trust_remote_code, nor what Python would import."""
    monkeypatch.chdir(tmp_path)
    model = GPT(GPTConfig(block_size=8, vocab_size=257, n_layer=1, n_head=2, n_embd=8))
    save(model, tmp_path, tokenizer_to_json(build_tokenizer("byte")))
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py", "torch.py"):
        (tmp_path / name).write_text('import os\nos.mkdir("ran")\n')
    code = {
        "auto_map": {"AutoModelForCausalLM": "modeling.Evil", "AutoConfig": "configuration.Evil"},
        "custom_pipelines": {"x": {"impl": "evil.py"}},
    }
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        values = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        (tmp_path / name).write_text(json.dumps(values | code), encoding="utf-8")
    for name in ("pytorch_model.bin", "model.bin", "training_state.pt"):
        torch.save({"x": Evil()}, tmp_path / name)
    load_tokenizer(tmp_path)
    load_model(GPT, tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "model.safetensors").unlink()  # the pickled weights are no substitute
    with pytest.raises(Exception, match=r"safetensors|pickle"):
        load_model(GPT, tmp_path)
    np.save(tmp_path / "val.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(Exception, match=r"pickle|object"):
        open_tokens(tmp_path / "val.npy")
    assert not (tmp_path / "ran").exists()


def test_pytorch_files_are_opened_without_pickle():
    for file in [*ROOT.glob("*.py"), *PACKAGE]:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.load":
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert options.get("weights_only") == "True", file


@pytest.mark.parametrize("file", [ROOT / "model.py", *PACKAGE], ids=lambda file: file.name)
def test_the_package_knows_no_script_and_the_model_nothing_of_ours(file):
    tree, scripts = ast.parse(file.read_text(encoding="utf-8")), {f.stem for f in ROOT.glob("*.py")}
    imported = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    imported += [n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    forbidden = {"gptling", *scripts} if file.stem == "model" else scripts
    assert not forbidden & {name.split(".")[0] for name in imported}

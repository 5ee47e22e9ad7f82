"""sample.py --explain: what the page holds and, in headless Chromium, what it shows."""

import base64
import json
import shutil

import numpy as np
import pytest
import tiktoken
import torch

from gptling.cli import UserError
from gptling.explain import explain, visible, write_page
from gptling.gpt2_format import save
from gptling.pretrained import load_model
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from tests.conftest import randomised
from tests.edits import edited
from tests.scripts import output_of

BYTES = build_tokenizer("byte", end_of_text=False)
PROMPT = "1 gr"
CLOSE = {"rtol": 0, "atol": 0.5 / 65535 + 1e-6}  # a weight is stored in steps of 1 / 65535
IMAGE = "<img src=x onerror='window.hacked = 1'>"
SCRIPT = "</script><script>window.hacked = 1</script>"
HOSTILE = [SCRIPT, IMAGE, "__DATA__</script>", "__DATA__", "\u2028\u202e&lt;"]


def read_data(page):
    """The JSON in a page, which no text in it can end."""
    written = page.read_text("utf-8").partition('id="data">')[2].partition("</script>")[0]
    assert "<" not in written
    return json.loads(written)


def read_weights(data):
    """The attention of a page's data, (n_layer, n_head, T, T) in float64."""
    T = len(data["tokens"])
    codes = np.frombuffer(base64.b64decode(data["attention"]), dtype="<u2")
    weights = torch.zeros(data["n_layer"], data["n_head"], T, T, dtype=torch.float64)
    triangle = torch.from_numpy(codes / 65535).view(data["n_layer"], data["n_head"], -1)
    weights[:, :, *torch.tril_indices(T, T)] = triangle
    return weights


@torch.no_grad()
def attention_of(model, ids):
    """The formula in model.py, attention_weights, for each call of a layer that has it, with what
    the layer is given in the model's forward pass: (n_layer, n_head, T, T) in float64."""
    weights = []

    def keep(layer, x, y):
        if hasattr(layer, "attention_weights"):
            weights.append(layer.attention_weights(*x))

    with torch.nn.modules.module.register_module_forward_hook(keep):
        model(torch.tensor([ids]))
    return torch.cat(weights).double()


@pytest.fixture(scope="module")
def explained(trained, tmp_path_factory):
    """A page of the tiny run, whose text fits its window; with its model and token ids."""
    page = tmp_path_factory.mktemp("explained") / "page.html"
    common = ["out/mine", "--prompt", PROMPT, "--max_new_tokens=11", "--dtype=float32"]
    text = output_of("sample.py", *common, "--explain", page, cwd=trained)
    path = trained / "out/mine/checkpoint-20"
    return page, load_model(GPT, path), load_tokenizer(path).encode_ordinary(text[:-1])


def random_model(*changes, **sizes):
    """Of a changed model.py. Its weights are large enough for an error to show."""
    sizes = {"block_size": 16, "vocab_size": 256, "n_layer": 2, "n_head": 2, "n_embd": 32} | sizes
    module = edited(*changes).model
    return randomised(module.GPT(module.GPTConfig(**sizes)), std=0.5)


# ---------------------------------------------------------------------------- the attention
@torch.no_grad()
def test_page_holds_the_attention_and_the_probabilities_of_the_model(explained):
    page, model, ids = explained
    data = read_data(page)
    assert (data["n_prompt"], len(data["tokens"])) == (len(PROMPT), len(ids))
    weights, expected = read_weights(data), attention_of(model, ids)
    torch.testing.assert_close(weights, expected, **CLOSE)

    probs = model(torch.tensor([ids]))[0][0].softmax(dim=-1)
    for t in range(1, len(ids)):
        row, (probability, rank, shown) = probs[t - 1], data["places"][t - 1]
        likeliest = row.sort(descending=True)
        assert probability == pytest.approx(row[ids[t]].item(), abs=1e-6)
        assert [p for _, p, _ in shown] == pytest.approx(likeliest.values[:10].tolist(), abs=1e-6)
        assert likeliest.indices[rank - 1] == ids[t]
        assert [same for *_, same in shown] == [i == rank - 1 for i in range(10)]


KERNEL = "        y = self.attend(q, k, v, **options, dropout_p=dropout_p)  # (B, nh, T, hs)\n"
FORMULA = "        y = (q @ k.mT / 4 + torch.full((12, 12), -math.inf).triu(1)).softmax(-1) @ v\n"
SINK = "        k, v, options = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), {}\n"
ALL = "        options = {}\n"
TWICE = KERNEL + "        y = y - 0.5 * self.attend(q.flip(-1), k, v, **options)\n"


@pytest.mark.gpt2
@pytest.mark.parametrize("new", [FORMULA, SINK + KERNEL, ALL + KERNEL])
def test_attention_that_cannot_be_shown_is_one_line(new):
    """Written out, of a key more, and of the future."""
    with pytest.raises(UserError, match="all 12 tokens"):
        explain(random_model((KERNEL, new)), BYTES, list(range(65, 77)), 1)


@pytest.mark.gpt2
def test_layers_that_attend_twice_show_each_call():
    """Differential attention: the difference has weights outside 0 to 1, but each call has none."""
    data = explain(random_model((KERNEL, TWICE)), BYTES, [65] * 9, 1)
    assert (data["call"], data["n_layer"]) == ("attention call", 4)
    weights = read_weights(data)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 2, 9).double(), rtol=0, atol=1e-3)
    assert (weights[0] - weights[1]).abs().max() > 0.01


# ---------------------------------------------------------------------------- the logit lens
@torch.no_grad()
def lens_of(model, ids):
    """What each layer would predict, block by block: probabilities (n_layer + 1, T - 1, V)."""
    states = [model.wte(torch.tensor([ids])) + model.wpe(torch.arange(len(ids)))]
    for block in model.h:
        x = block(states[-1].clone())
        states.append(x[0] if isinstance(x, tuple) else x)
    return model.lm_head(model.ln_f(torch.cat(states)))[:, :-1].softmax(dim=-1)


IN_PLACE = "        x = x + self.attn(", "        x += self.attn("


@pytest.mark.gpt2
@pytest.mark.parametrize("changes", [(), (IN_PLACE,), ("moe",), ("shared",)])
def test_a_page_holds_what_each_layer_would_predict(changes):
    """Also of blocks that change their x, that return two values, and that are all the same one.
    The last layer predicts what the model does."""
    model, ids = random_model(*changes, n_layer=3), [*range(65, 77)]
    data = explain(model, BYTES, ids, 1)
    for layer, probs in zip(data["lens"], lens_of(model, ids), strict=True):
        for place, row, token in zip(layer, probs, ids[1:], strict=True):
            p, rank, [[label, highest, same]] = place
            best = int(row.argmax())
            assert label == visible(bytes([best])) and same == (best == token) == (rank == 1)
            assert [highest, p] == pytest.approx(row[[best, token]].tolist(), abs=1e-5)
    assert data["lens"][-1] == [[p, rank, best[:1]] for p, rank, best in data["places"]]


NORM = "self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)"
NO_NORM = (NORM, "pass"), ("self.ln_f(x)", "F.layer_norm(x, x.shape[-1:])")
NO_LIST = ("self.h = nn", "self.all = nn"), ("self.h.", "self.all."), ("(self.h)", "(self.all)")
SHARPER = ("self.logits(x[:, -1:] if last_only else x)", "2 * self.logits(x)")
AGAIN = ("enumerate(self.h)", "enumerate([*self.h, *self.h])")


@pytest.mark.gpt2
@pytest.mark.parametrize("changes", [NO_NORM, NO_LIST, (SHARPER,), (AGAIN,)])
def test_layers_that_cannot_be_read_are_not_shown(changes):
    """Without ln_f, without h, with logits made otherwise, and with more calls than blocks."""
    data = explain(random_model(*changes), BYTES, [65] * 9, 1)
    assert data["lens"] == [] and len(data["places"]) == 8


# ---------------------------------------------------------------------------- the tokens
@pytest.mark.parametrize("n_prompt, n", [(4, 40), (40, 44), (1, 1)])
def test_a_long_text_is_cut_at_the_window_and_the_page_says_so(n_prompt, n):
    model, ids = random_model(), [*range(65, 65 + n)]
    data = explain(model, BYTES, ids, n_prompt)
    assert data["tokens"] == [chr(i) for i in ids[:16]]
    assert (data["n_prompt"], data["omitted"]) == (min(n_prompt, 16), max(0, n - 16))
    torch.testing.assert_close(read_weights(data), attention_of(model, ids[:16]), **CLOSE)
    assert explain(random_model(block_size=300), BYTES, 299 * [65], 1)["omitted"] == 299 - 256


def test_a_page_shows_float32_and_only_the_ids_of_the_tokenizer(tmp_path):
    """sample.py draws from a wide model in bfloat16. 44 of the 300 ids only pad the vocabulary."""
    model = GPT(GPTConfig(16, 300, 1, 4, 256)).eval()
    save(model, tmp_path, tokenizer_to_json(BYTES))
    arguments = [tmp_path, "--prompt=é", "--max_new_tokens=6", "--dtype=bfloat16"]
    text = output_of("sample.py", *arguments, "--explain=page.html", cwd=tmp_path)
    assert text == output_of("sample.py", *arguments, cwd=tmp_path)
    data, ids = read_data(tmp_path / "page.html"), list("é".encode())
    assert data["tokens"][:2] == ["\\xc3", "\\xa9"] and len(data["tokens"]) == 8
    torch.testing.assert_close(read_weights(data)[..., :2, :2], attention_of(model, ids), **CLOSE)
    probs = model(torch.tensor([ids]))[0][0, 0, :256].softmax(dim=-1)
    assert data["places"][0][0] == pytest.approx(probs[ids[1]].item(), abs=1e-6)


def test_every_token_can_be_seen():
    assert visible("\n\n\té🙂".encode()) == "↵↵→é🙂"
    assert visible(b" \xe2\x80\0\r") == "·\\xe2\\x80U+0000U+000D"
    assert visible("\u202e\u2028\xa0".encode()) == "U+202EU+2028U+00A0"


def test_no_text_can_end_the_data_of_a_page(tmp_path):
    write_page(tmp_path / "page.html", {"tokens": HOSTILE})
    assert read_data(tmp_path / "page.html") == {"tokens": HOSTILE}


# ---------------------------------------------------------------------------- the browser
@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, by Selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -e '.[browser]'")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as chrome:
        yield chrome


def open_page(browser, page, data=None):
    """Load a page, with these data, and return a function that evaluates an expression there."""
    if data:
        write_page(page, data)
    browser.get(page.as_uri())
    return lambda js, *element: browser.execute_script(f"return {js}", *element)


TOKENS = "[...document.querySelectorAll('.token')]"
SHOWN = f"{TOKENS}.findIndex((token) => token.classList.contains('shown'))"
SHADING = f"{TOKENS}.map((token) => Number(token.style.getPropertyValue('--weight')))"
TEXT = "document.getElementById(arguments[0]).innerText"
LENS = """[...document.querySelectorAll('#lens tbody tr')]
    .map((row) => [...row.cells].map((cell) => cell.textContent))"""
OPACITY = """(({ width, height }, context) => [...context.getImageData(0, 0, width, height).data]
    .filter((value, i) => i % 4 === 3))(arguments[0], arguments[0].getContext("2d"))"""


def percent(p):
    return "<0.01%" if p < 5e-5 else f"{100 * p:.{2 if p < 0.0995 else 1}f}%"


@pytest.mark.slow
def test_a_walk_by_keyboard_shows_weights_probabilities_and_alternatives(browser, explained):
    from selenium.webdriver.common.keys import Keys

    page, model, ids = explained
    data, expected, evaluate = read_data(page), attention_of(model, ids), open_page(browser, page)
    tokens = browser.find_elements("css selector", ".token")
    assert [token.text for token in tokens] == data["tokens"]
    browser.find_element("id", "layer").send_keys("layer 0")
    browser.find_element("css selector", "#heads [value='0']").send_keys(Keys.ARROW_RIGHT)
    assert evaluate(TEXT, "where").lower() == "layer 0, head 1"
    # Matrices: both heads of the layer, then the one picked; a pixel's opacity is a weight's root.
    for canvas, head in zip(browser.find_elements("tag name", "canvas"), (0, 1, 1), strict=True):
        opacity = torch.tensor(evaluate(OPACITY, canvas)).view(len(ids), len(ids))
        assert (opacity - 255 * expected[0, head].sqrt()).abs().max() <= 1

    tokens[0].click()
    assert evaluate(LENS) == [[x, "", "", ""] for x in ("embeddings", "block 0", "block 1")]
    for t in range(len(ids)):
        assert evaluate(SHOWN) == t and f"position {t} " in evaluate(TEXT, "place")
        weights = torch.tensor(evaluate(SHADING), dtype=torch.float64)
        torch.testing.assert_close(weights, expected[0, 1, t], **CLOSE)
        if t > 0:
            p, rank, alternatives = data["places"][t - 1]
            said = f"Probability {percent(p)}, rank {rank:,}"
            assert evaluate(TEXT, "probability") == said
            shown = [e.text for e in browser.find_elements("css selector", "#alternatives .text")]
            assert shown == [label for label, *_ in alternatives]
            for row, layer in zip(evaluate(LENS), data["lens"], strict=True):
                own, _, [[label, p, _]] = layer[t - 1]
                assert row[1:] == [label, percent(p), percent(own)]
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)


@pytest.mark.slow
def test_hostile_text_stays_text(browser, tmp_path):
    """In tokens, in alternatives and in the name of the checkpoint."""
    ranks = {token.encode(): i for i, token in enumerate(HOSTILE)}
    encoding = tiktoken.Encoding("x", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    data = explain(random_model(vocab_size=len(HOSTILE)), encoding, [*range(len(HOSTILE))], 1)
    evaluate = open_page(browser, tmp_path / "page.html", {"model": IMAGE} | data)
    labels = [visible(token.encode()) for token in HOSTILE]
    assert evaluate(f"{TOKENS}.map((token) => token.textContent)") == labels
    assert {row[1] for row in evaluate(LENS)} <= set(labels)
    assert IMAGE in evaluate(TEXT, "model") and evaluate("window.hacked === undefined")
    assert evaluate("document.querySelectorAll('img, script').length") == 2


@pytest.mark.slow
@pytest.mark.gpt2
def test_a_page_without_the_table_says_why(browser, tmp_path):
    data = explain(random_model(*NO_NORM), BYTES, [65] * 9, 1)
    evaluate = open_page(browser, tmp_path / "page.html", {"model": "edited"} | data)
    assert "model.logits(model.ln_f(x))" in evaluate(TEXT, "no-lens")
    assert evaluate("document.getElementById('lens') === null")
    assert "position 8 " in evaluate(TEXT, "place")

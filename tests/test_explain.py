"""sample.py --explain: what the page holds and, in headless Chromium, what it shows."""

import base64
import json
import re
import shutil

import numpy as np
import pytest
import tiktoken
import torch

from gptling.cli import UserError, load
from gptling.explain import check_page, explain, visible, write_page
from gptling.gpt2_format import save
from gptling.pretrained import load_model
from gptling.tokenizers import build_tokenizer, load_tokenizer, tokenizer_to_json
from model import GPT, GPTConfig
from sample import SampleConfig
from tests.changed_model import ChangedGPT
from tests.conftest import output_of, run_script

BYTES = build_tokenizer("byte", end_of_text=False)
PROMPT = "1 gr"
HALF = 0.5 / 65535  # a weight is stored in steps of 1 / 65535
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "__DATA__</script>",
    "\u2028\u202e&lt;",
    "</ScRiPt >",
]


def read_data(page):
    """The JSON in a page."""
    html = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


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
    """attention_weights of each layer that has them, of what the layer is given in the model's own
    forward pass, (n_layer, n_head, T, T)."""
    inputs = {}
    layers = [m for m in model.modules() if hasattr(m, "attention_weights")]
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, y: inputs.update({layer: args[0]}))
    model(torch.tensor([ids]))
    for layer in layers:
        layer._forward_hooks.clear()
    return torch.cat([layer.attention_weights(inputs[layer]) for layer in layers])


@pytest.fixture(scope="module")
def explained(trained, tmp_path_factory):
    """A page of the tiny run, whose text fits its window; with its model and token ids."""
    page = tmp_path_factory.mktemp("explained") / "page.html"
    page.write_text("an older page, which gives way")
    common = ["out/mine", "--prompt", PROMPT, "--max_new_tokens=11", "--dtype=float32"]
    text = output_of("sample.py", *common, "--explain", page, cwd=trained)
    assert text == output_of("sample.py", *common, cwd=trained)
    path = trained / "out" / "mine" / "checkpoint-20"
    ids = load_tokenizer(path).encode_ordinary(text[:-1])
    return page, load_model(GPT, path), ids


def random_model(V, model_class=GPT):
    torch.manual_seed(0)
    model = model_class(GPTConfig(16, V, n_layer=2, n_head=2, n_embd=16)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


# ---------------------------------------------------------------------------- the data


def test_page_holds_the_weights_of_attention_causal_and_summing_to_one(explained):
    page, model, ids = explained
    weights = read_weights(read_data(page))
    expected = attention_of(model, ids).double()
    torch.testing.assert_close(weights, expected, rtol=0, atol=HALF + 1e-6)
    assert weights.triu(1).abs().max() == 0 and expected.triu(1).abs().max() == 0
    assert (weights.sum(dim=-1) - 1).abs().max() <= len(ids) * HALF + 1e-6


def test_probabilities_are_the_models_own_and_alternatives_the_likeliest(explained):
    page, model, ids = explained
    data = read_data(page)
    with torch.no_grad():
        probs = model(torch.tensor([ids]))[0][0].softmax(dim=-1)
    assert (data["n_prompt"], len(data["tokens"])) == (len(PROMPT), len(ids))
    for t in range(1, len(ids)):
        row = probs[t - 1]
        assert data["probabilities"][t - 1] == pytest.approx(row[ids[t]].item(), abs=1e-6)
        likeliest = row.sort(descending=True)
        shown = data["alternatives"][t - 1]
        assert [p for _, p, _ in shown] == pytest.approx(likeliest.values[:10].tolist(), abs=1e-6)
        rank = data["ranks"][t - 1]
        assert likeliest.indices[rank - 1] == ids[t]
        assert [same for *_, same in shown] == [i == rank - 1 for i in range(10)]


def test_greedy_text_has_rank_one_throughout(trained, tmp_path):
    page = tmp_path / "page.html"
    arguments = ["out/mine", "--prompt", PROMPT, "--max_new_tokens=12", "--temperature=0"]
    output_of("sample.py", *arguments, f"--explain={page}", "--dtype=float32", cwd=trained)
    assert set(read_data(page)["ranks"][len(PROMPT) - 1 :]) == {1}


@pytest.mark.parametrize(
    "n_prompt, n, before, after",
    [(4, 8, 0, 0), (4, 40, 0, 24), (12, 40, 4, 20), (40, 40, 24, 0), (40, 44, 28, 0), (1, 1, 0, 0)],
)
def test_a_long_text_is_cut_where_the_page_says(n_prompt, n, before, after):
    """At the window of 16; the beginning stays unless the prompt takes more than half of it."""
    model, ids = random_model(256), torch.arange(65, 65 + n).tolist()
    data = explain(model, BYTES, ids, n_prompt)
    shown = ids[before : n - after]
    assert data["tokens"] == [chr(i) for i in shown] and data["n_prompt"] == n_prompt - before
    assert data["omitted"] == {"before": before, "after": after}
    expected = attention_of(model, shown).double()
    torch.testing.assert_close(read_weights(data), expected, rtol=0, atol=HALF + 1e-6)


def test_ids_that_only_pad_the_vocabulary_have_no_probability():
    """The model has 300 ids, the tokenizer 256: what is shown sums to 1 over these."""
    model = random_model(300)
    model.restrict_to_tokens(range(256))
    ids = list(b"some text")
    data = explain(model, BYTES, ids, 1)
    with torch.no_grad():
        probs = model(torch.tensor([ids]))[0][0, :-1, :256].softmax(dim=-1)
    expected = probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert data["probabilities"] == pytest.approx(expected.tolist(), abs=1e-6)


def test_no_text_can_end_the_data_of_a_page(tmp_path):
    data = {"tokens": HOSTILE}
    write_page(tmp_path / "page.html", data)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    written = html.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(written) == data and not set(written) & set("<>&")


@pytest.mark.parametrize("model_class", [GPT, ChangedGPT])
def test_weights_are_those_that_the_outcome_comes_from(model_class):
    """A token's logits depend on the tokens that it attends to: those with a weight, no others."""
    model = random_model(256, model_class)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0)
    ids = torch.arange(65, 77).tolist()
    data = explain(model, BYTES, ids, 4)
    weights = read_weights(data)
    expected = attention_of(model, ids).double()
    torch.testing.assert_close(weights, expected, rtol=0, atol=HALF + 1e-6)
    assert (data["n_layer"], data["n_head"]) == (2, 2) and weights.triu(1).max() == 0
    assert (weights.sum(dim=-1) - 1).abs().max() <= len(ids) * HALF + 1e-6
    with torch.no_grad():
        probs = model(torch.tensor([ids]))[0][0].softmax(dim=-1)
    shown = [probs[t, ids[t + 1]].item() for t in range(len(ids) - 1)]
    assert data["probabilities"] == pytest.approx(shown, abs=1e-6)


def test_a_model_without_attention_weights_is_refused():
    model = random_model(256)
    model.h = torch.nn.ModuleList()
    with pytest.raises(UserError, match=r"--explain.*attention_weights"):
        explain(model, BYTES, [65, 66], 1)


def test_deep_models_show_fewer_tokens(monkeypatch):
    monkeypatch.setattr("gptling.explain.PAGE_WEIGHTS", 300)
    data = explain(random_model(256), BYTES, [65] * 16, 2)
    assert len(data["tokens"]) == 12 and len(base64.b64decode(data["attention"])) <= 2 * 330


def test_wide_models_are_explained_as_stored(tmp_path):
    """sample.py draws from them in bfloat16 and in oneDNN's layouts."""
    model = GPT(GPTConfig(16, 256, 1, 4, 256)).eval()
    save(model, tmp_path, tokenizer_to_json(BYTES))
    arguments = [tmp_path, "--prompt=é", "--max_new_tokens=6", "--dtype=bfloat16"]
    page = tmp_path / "page.html"
    text = output_of("sample.py", *arguments, f"--explain={page}", cwd=tmp_path)
    assert text == output_of("sample.py", *arguments, cwd=tmp_path)
    data = read_data(page)
    assert data["tokens"][:2] == ["\\xc3", "\\xa9"] and len(data["tokens"]) == 8
    weights = attention_of(model, BYTES.encode_ordinary("é")).double()
    shown = read_weights(data)[:, :, :2, :2]
    torch.testing.assert_close(shown, weights, rtol=0, atol=HALF + 1e-6)


def test_tokens_of_gpt2(gpt2_encoding):
    ids = [*gpt2_encoding.encode_ordinary("naïve ⟨\n"), gpt2_encoding.eot_token]
    data = explain(random_model(50257), gpt2_encoding, ids, 3)
    labels = ["na", "ïve", "·\\xe2", "\\x9f", "\\xa8", "↵", "<|endoftext|>"]
    assert data["tokens"] == labels
    assert all(len(row) == 10 for row in data["alternatives"])


@pytest.mark.parametrize(
    "raw, label",
    [
        (b" the", "·the"),
        (b"\n\n\t", "↵↵→"),
        ("é🙂".encode(), "é🙂"),
        (b" \xe2\x80", "·\\xe2\\x80"),
        (b"\0\r", "U+0000U+000D"),
        ("\u202e\u2028\xa0".encode(), "U+202EU+2028U+00A0"),
    ],
)
def test_every_token_can_be_seen(raw, label):
    assert visible(raw) == label


# ---------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--explain=page.html", "--num_samples=2"], ["--explain", "--num_samples"]),
        (["--explain=page.html", "--interactive"], ["--explain", "--interactive"]),
        (["--explain=page.html", "--prompts=mine.txt"], ["--explain", "--prompts"]),
        (["--explain=page.txt"], ["page.txt", ".html"]),
    ],
)
def test_flags_that_do_not_go_together_are_usage_errors(capsys, arguments, named):
    with pytest.raises(SystemExit) as exit:
        load(SampleConfig, "", arguments)
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert all(name in error for name in named)


@pytest.mark.parametrize("name", ["nix/page.html", "file/page.html", "folder.html"])
def test_a_page_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(UserError, match=rf"{name}: cannot be written: "):
        check_page(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]


def test_the_page_is_checked_before_a_model_is_loaded(tmp_path):
    process = run_script("sample.py", "no-such-run", "--explain=nix/page.html", cwd=tmp_path)
    error = process.stderr.decode()
    assert process.returncode == 1 and error.count("\n") == 1
    assert "nix/page.html: cannot be written" in error


def test_a_page_that_cannot_be_finished_leaves_the_older_one(tmp_path, monkeypatch):
    def full(self, content):
        self.write_text("<html>")
        raise OSError(28, "No space left on device")

    page = tmp_path / "page.html"
    page.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(UserError, match=r"page\.html.*disk is full.*MB are left"):
            write_page(page, {})
    assert page.read_text() == "older" and list(tmp_path.iterdir()) == [page]


# ---------------------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium, by Selenium."""
    pytest.importorskip("selenium", reason="no selenium: pip install -e '.[browser]'")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def open_page(browser, page, width=1280, scheme="light"):
    """Load a page at the size of a phone or a desktop."""
    phone = width < 500
    size = {"width": width, "height": 740 if phone else 800, "deviceScaleFactor": 1}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"mobile": phone})
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())


def shown_weights(browser):
    """The shading of every token, (T,)."""
    script = """return [...document.querySelectorAll(".token")].map(
        (token) => Number(token.style.getPropertyValue("--weight")))"""
    return torch.tensor(browser.execute_script(script), dtype=torch.float64)


def shown_token(browser):
    """The position of the token that the page tells of."""
    script = """return [...document.querySelectorAll(".token")].findIndex(
        (token) => token.classList.contains("shown"))"""
    return browser.execute_script(script)


def text_of(browser, id):
    return browser.execute_script("return document.getElementById(arguments[0]).innerText", id)


def pick(browser, layer, head):
    """Choose layer and head with the keyboard alone."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.find_element(By.ID, "layer").send_keys(str(layer))
    checked = browser.find_element(By.CSS_SELECTOR, "#heads :checked")
    there = int(checked.get_attribute("value"))
    key = Keys.ARROW_RIGHT if head > there else Keys.ARROW_LEFT
    for _ in range(abs(head - there)):
        checked.send_keys(key)
        checked = browser.find_element(By.CSS_SELECTOR, "#heads :checked")


@pytest.mark.slow
def test_shading_is_attention_weights_for_every_layer_head_and_token(browser, explained):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page, model, ids = explained
    expected = attention_of(model, ids).double()
    open_page(browser, page)
    for layer in range(2):
        for head in range(2):
            pick(browser, layer, head)
            assert f"layer {layer}, head {head}" in text_of(browser, "where").lower()
            browser.find_elements(By.CSS_SELECTOR, ".token")[0].click()
            for t in range(len(ids)):
                assert shown_token(browser) == t
                weights = shown_weights(browser)
                error = (weights - expected[layer, head, t]).abs().max()
                assert error <= HALF + 1e-6
                assert weights[t + 1 :].sum() == 0
                assert abs(weights.sum() - 1) <= len(ids) * HALF + 1e-6
                browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_matrices_are_drawn_from_the_weights(browser, explained):
    """The opacity of each pixel is the root of its weight; right of the diagonal is nothing."""
    page, model, ids = explained
    open_page(browser, page)
    pick(browser, 1, 1)
    script = """const canvas = document.querySelectorAll("canvas")[arguments[0]];
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        return [...data].filter((value, i) => i % 4 === 3)"""
    expected = 255 * attention_of(model, ids)[1].sqrt()
    for canvas, head in ((0, 0), (1, 1), (2, 1)):  # the heads to pick from, then the one picked
        opacity = torch.tensor(browser.execute_script(script, canvas)).view(len(ids), len(ids))
        assert (opacity - expected[head]).abs().max() <= 1
        assert opacity.triu(1).sum() == 0


@pytest.mark.slow
def test_a_token_shows_its_probability_and_alternatives_by_mouse_and_keyboard(browser, explained):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page, _, ids = explained
    data = read_data(page)
    open_page(browser, page)
    tokens = browser.find_elements(By.CSS_SELECTOR, ".token")
    assert [token.text for token in tokens] == data["tokens"]
    ActionChains(browser).move_to_element(tokens[6]).perform()
    assert shown_token(browser) == 6
    p = data["probabilities"][5]
    assert f"{100 * p:.1f}%" in text_of(browser, "probability") or p < 0.1
    assert f"rank {data['ranks'][5]}" in text_of(browser, "probability")
    rows = browser.find_elements(By.CSS_SELECTOR, "#alternatives .text")
    assert [row.text for row in rows] == [label for label, *_ in data["alternatives"][5]]
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert shown_token(browser) == len(ids) - 1  # the mouse only looks; a click stays

    tokens[6].click()
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    for key, position in (
        (Keys.ARROW_LEFT, 5),
        (Keys.HOME, 0),
        (Keys.ARROW_LEFT, 0),
        (Keys.END, len(ids) - 1),
        (Keys.ARROW_RIGHT, len(ids) - 1),
    ):
        browser.switch_to.active_element.send_keys(key)
        assert shown_token(browser) == position
        assert f"position {position} " in text_of(browser, "place")
    assert "Attended most to" in text_of(browser, "status")
    script = "return document.querySelectorAll('.token[tabindex=\"0\"]').length"
    assert browser.execute_script(script) == 1  # Tab reaches the text once, then the layers
    browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element.get_attribute("id") == "layer"
    assert browser.get_log("browser") == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_and_can_be_read(browser, explained, scheme):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page, *_ = explained
    open_page(browser, page, width=360, scheme=scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") == 360
    boxes = [token.rect for token in browser.find_elements(By.CSS_SELECTOR, ".token")]
    # The token above the last one, whose line is as long as the model's text makes it.
    above = next(i for i, box in enumerate(boxes) if abs(box["x"] - boxes[-1]["x"]) < 1)
    box = boxes[above]
    assert 0 < above < len(boxes) - 1
    assert box["width"] >= 24 and box["height"] >= 24
    point = [{"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}]
    for kind, points in (("touchStart", point), ("touchEnd", [])):
        event = {"type": kind, "touchPoints": points}
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", event)
    assert shown_token(browser) == above
    token = browser.switch_to.active_element
    token.send_keys(Keys.ARROW_DOWN)
    below = browser.switch_to.active_element
    assert below.rect["y"] > token.rect["y"] and abs(below.rect["x"] - box["x"]) < 1
    below.send_keys(Keys.ARROW_UP)
    assert shown_token(browser) == above
    # The contrast of text with the darkest shading behind it, by WCAG's formula.
    script = """const style = getComputedStyle(document.documentElement);
        const names = ["--ink", "--muted", "--page", "--shade"];
        return names.map((name) => style.getPropertyValue(name))"""
    ink, muted, background, shade = map(luminance, browser.execute_script(script))
    for text, behind in ((ink, background), (muted, background), (ink, shade)):
        assert (max(text, behind) + 0.05) / (min(text, behind) + 0.05) >= 4.5
    assert background > 0.8 if scheme == "light" else background < 0.05
    assert browser.get_log("browser") == []


def luminance(color):
    """WCAG's relative luminance of #rrggbb."""
    values = [int(color.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_hostile_text_stays_text(browser, tmp_path):
    """In tokens, in alternatives and in the name of the checkpoint; nothing is loaded either."""
    ranks = {token.encode(): i for i, token in enumerate(HOSTILE)}
    encoding = tiktoken.Encoding("x", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    data = explain(random_model(len(HOSTILE)), encoding, [*range(len(HOSTILE))], 1)
    write_page(tmp_path / "page.html", {"model": HOSTILE[1]} | data)
    open_page(browser, tmp_path / "page.html")
    labels = [visible(token.encode()) for token in HOSTILE]
    script = "return [...document.querySelectorAll('.token')].map((token) => token.textContent)"
    assert browser.execute_script(script) == labels
    assert HOSTILE[1] in text_of(browser, "model")
    assert browser.execute_script("return window.hacked === undefined")
    assert browser.execute_script("return document.querySelectorAll('img, script').length") == 2
    loaded = browser.execute_script("return performance.getEntriesByType('resource').length")
    assert loaded == 0 and browser.get_log("browser") == []

"""Edits of model.py that code beside it could get wrong in silence: it is right, or says so."""

import tomllib
from dataclasses import dataclass

import pytest
import torch

from gptling.cli import UserError
from gptling.decoding import speed_up
from gptling.explain import logits_and_attention
from gptling.gpt2_format import ChangedModelError, load, save
from gptling.loss import loss_in_pieces, use_loss_in_pieces
from gptling.run import as_preset, resumed_config
from model import GPT
from tests.edits import edited_module
from tests.test_changed_model import batch, random_model
from tests.test_model import generate, padded
from tests.test_sample import compile_by
from train import TrainConfig

pytestmark = pytest.mark.gpt2  # the edits are of the unchanged model.py

MASK = "        mask = self.causal_mask[None, None, past : past + T, :S]\n"
DISTANCE = "torch.arange(past, past + T)[:, None] - torch.arange(S)"
ATTENTION = "        x = x + self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)\n"
MLP = "        return x + self.mlp(self.ln_2(x))"
HIDDEN_LOGIT = "self.lm_head(x).index_fill(-1, torch.tensor([3]), -math.inf)"
CALL = "block(x, padding_mask, cache[i] if cache else None)"
SUMMED = "        return logits, losses.sum() / (targets != -100).sum()"


# ---------------------------------------------------------------------------- masks


def test_a_mask_of_training_alone_acts_after_loading_too(tmp_path, capsys):
    """Loading has looked at the mask in eval mode, which it leaves alone."""
    drop = "        if self.training:\n            mask = mask & (torch.rand(T, S) > 0.5)\n"
    model = random_model(edited_module((MASK, MASK + drop)))
    assert not save(model, tmp_path)
    idx, model = batch()[0], load(type(model), tmp_path)
    quiet = model(idx)[0]
    model.train()
    assert not torch.allclose(model(idx)[0], model(idx)[0], atol=0.1)
    use_loss_in_pieces(model)
    assert model.loss_in_pieces is loss_in_pieces and not capsys.readouterr().out
    assert torch.equal(model.eval()(idx)[0], quiet)


def test_a_window_beyond_the_tokens_that_loading_looks_at_is_told(tmp_path):
    """A larger model is compared on fewer tokens, and on enough for the window."""
    window = MASK, f"{MASK}        mask = mask & ({DISTANCE} < 200)\n"
    sizes = {"n_embd": 512, "vocab_size": 20_000, "block_size": 512}
    save(random_model(edited_module(window), **sizes), tmp_path)
    with pytest.raises(ChangedModelError):
        load(GPT, tmp_path)
    load(edited_module(window).GPT, tmp_path)
    with pytest.raises(ChangedModelError):
        load(edited_module((window[0], window[1].replace("200", "300"))).GPT, tmp_path)


# ---------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("prompts", [[[5]], [[5, 6, 7, 8]], [[5], [6, 7, 8, 9, 10]]])
@pytest.mark.parametrize(
    "old, new",
    [
        (ATTENTION, "        x = (x + F.pad(x, (0, 0, 1, -1))) / 2\n" + ATTENTION),
        ("self.wte(idx) + ", "self.wte((idx + 3 * F.pad(idx, (1, -1))) % 97) + "),
        (ATTENTION, "        x = (x + F.pad(x, (0, 0, 4, 0))[:, : x.size(1)]) / 2\n" + ATTENTION),
    ],
    ids=["the token before", "pairs of tokens", "the fourth token before"],
)
@pytest.mark.parametrize("hidden", [False, True], ids=["all logits", "one that is -inf"])
def test_what_looks_back_without_the_cache_is_told_when_text_is_drawn(
    old, new, hidden, prompts, capsys
):
    changes = [(old, new)]
    if hidden:
        changes.append(("return self.lm_head(x)", f"return {HIDDEN_LOGIT}"))
    model = random_model(edited_module(*changes))
    idx, mask = padded(prompts)
    generate(speed_up(model), idx, 4, temperature=0, padding_mask=mask)
    assert "tokens one by one, with model.py's cache, give other logits" in capsys.readouterr().err


def test_logits_of_which_some_are_hidden_are_not_told(capsys):
    model = random_model(edited_module(("return self.lm_head(x)", f"return {HIDDEN_LOGIT}")))
    generate(speed_up(model), torch.tensor([[5, 6]]), 4, temperature=0)
    assert not capsys.readouterr().err


def test_another_next_step_is_no_other_cache(capsys):
    twice = "return self(idx, **options)[0]", "return 2 * self(idx, **options)[0]"
    model = random_model(edited_module(twice))
    options = {"temperature": 0.5, "generator": torch.Generator().manual_seed(1)}
    drawn = generate(speed_up(model), torch.tensor([[5, 6]]), 8, **options)
    options["generator"].manual_seed(1)
    assert torch.equal(generate(model, torch.tensor([[5, 6]]), 8, **options), drawn)
    assert not capsys.readouterr().err


def test_a_weight_that_faster_layers_do_not_have_is_told_and_the_text_is_drawn(capsys, monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    normed = "F.linear(F.normalize(x, dim=-1), F.normalize(self.lm_head.weight, dim=-1))"
    model = random_model(edited_module(("return self.lm_head(x)", f"return {normed}")), n_embd=256)
    expected = generate(model, torch.tensor([[5, 6]]), 4, temperature=0)
    assert torch.equal(
        generate(speed_up(model), torch.tensor([[5, 6]]), 4, temperature=0), expected
    )
    assert "the faster layers (" in capsys.readouterr().err


# ---------------------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    "third",
    ["losses.mean()", "0.5", '{"balance": 0.5}', '{"z": losses}', '{"loss": losses.mean()}'],
)
def test_a_third_value_that_is_no_dict_of_scalars_is_an_error(third):
    model = random_model(edited_module((SUMMED, f"{SUMMED}, {third}")))
    with pytest.raises(UserError, match=r"third value, .*: give \{name: scalar tensor\}"):
        use_loss_in_pieces(model)


@pytest.mark.parametrize(
    "changes",
    [
        [(SUMMED, f"{SUMMED} + 1e-4 * logits.float().logsumexp(-1).square().mean()")],
        [
            (SUMMED, f"{SUMMED} + 0.1 * sum(block.gain.abs().sum() for block in self.h)"),
            (
                "        self.mlp = MLP(config)",
                "        self.mlp = MLP(config)\n        self.gain = nn.Parameter(torch.zeros(C))",
            ),
            (MLP, "        return x + (1 + self.gain) * self.mlp(self.ln_2(x))"),
        ],
    ],
    ids=["a small one", "one that begins at zero"],
)
def test_what_forward_adds_to_the_losses_is_kept(changes, capsys):
    module = edited_module(*changes)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(16, 97, 2, 2, 32))
    use_loss_in_pieces(model)
    assert model.loss_in_pieces is None
    assert "forward's own loss is used" in capsys.readouterr().out
    assert model(*batch())[1].requires_grad, "the losses are its own again"


def test_averages_that_training_keeps_are_moved_by_training_alone():
    average = "        if self.training:\n            self.scale.lerp_(x.detach().norm(), 0.1)\n"
    module = edited_module(
        ("        x = F.gelu(", average + "        x = F.gelu("),
        (
            "        self.c_fc = nn.Linear(",
            '        self.register_buffer("scale", torch.ones(()))\n        self.c_fc = nn.Linear(',
        ),
    )
    model = random_model(module).train()
    use_loss_in_pieces(model)
    assert model.loss_in_pieces is loss_in_pieces
    assert all(block.mlp.scale == 1 for block in model.h)


def test_a_loss_of_a_moving_average_is_the_same_in_pieces(capsys):
    centred = """        x = self.ln_f(x)
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x - self.mean
"""
    buffer = '        self.register_buffer("mean", torch.zeros(config.n_embd))\n'
    first = "        self.untouched = "
    model = random_model(
        edited_module(("        return self.ln_f(x)\n", centred), (first, buffer + first))
    )
    use_loss_in_pieces(model.train())
    assert model.loss_in_pieces is loss_in_pieces and not capsys.readouterr().out
    assert not model.mean.any()


# ---------------------------------------------------------------------------- --explain

BY_HAND = [
    (
        "        y = self.attend(q, k, v, **options, dropout_p=dropout_p)  # (B, nh, T, hs)\n",
        "        mask, has_key = self.mask(T, S, past, padding_mask)\n"
        "        scores = 2 * torch.tanh(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) / 2)\n"
        "        y = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v\n",
    )
]


def test_attention_that_cannot_be_compared_is_said_to_be_unchecked(capsys):
    logits_and_attention(random_model(edited_module(*BY_HAND)), torch.randint(97, (1, 12)))
    assert "attention_weights say is shown, unchecked" in capsys.readouterr().err


def test_weights_of_further_keys_are_no_picture_of_the_tokens():
    sink = "        return scores.softmax(dim=-1) * has_key"
    wider = "        return F.pad(scores, (1, 0)).softmax(dim=-1) * has_key"
    with pytest.raises(UserError, match=r"another shape than \(12, 12\)"):
        logits_and_attention(random_model(edited_module((sink, wider))), torch.randint(97, (1, 12)))


def test_an_argument_that_attention_weights_lacks_is_one_line():
    attention = "def forward(self, x, context=None, *, padding_mask=None, cache=None"
    module = edited_module(
        (f"    {attention}):", f"    {attention}, gain=1):"),
        (ATTENTION, ATTENTION.replace("cache=cache", "cache=cache, gain=2")),
    )
    with pytest.raises(UserError, match=r"--explain: .*attention_weights.* 'gain'"):
        logits_and_attention(random_model(module), torch.randint(97, (1, 12)))


# ---------------------------------------------------------------------------- faster layers


def test_faster_layers_that_fail_are_left_out(capsys):
    """Somebody's own attention, in the model's dtype alone, cannot take keys in float32."""
    model = random_model(edited_module(*BY_HAND), n_embd=256).to(torch.bfloat16)
    idx = torch.randint(97, (2, 5))
    expected = generate(model, idx, 30, temperature=0)
    assert torch.equal(generate(speed_up(model), idx, 30, temperature=0), expected)
    assert "the faster layers (" in capsys.readouterr().err


def test_a_model_that_does_not_compute_in_a_dtype_is_one_line():
    table = '        self.register_buffer("table", torch.rand(16, 1), persistent=False)\n'
    module = edited_module(
        ("        self.h = nn.ModuleList(", table + "        self.h = nn.ModuleList("),
        ("self.wpe(positions)  #", "self.wpe(positions) + self.table[positions]  #"),
    )
    model = random_model(module)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(UserError, match=r"does not compute in torch.bfloat16: .*--dtype=float32"):
        generate(speed_up(model), torch.randint(97, (1, 5)), 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        [(CALL, "block(x, padding_mask=padding_mask, cache=cache[i] if cache else None)")],
        [
            (
                "    def __init__(self, config: GPTConfig):\n        super().__init__()\n"
                "        C,",
                "    def __init__(self, config: GPTConfig, i: int):\n"
                "        super().__init__()\n        self.i = i\n        C,",
            ),
            ("Block(config) for _ in range", "Block(config, i) for i in range"),
            (MLP, f"{MLP} / math.sqrt(self.i + 1)"),
        ],
    ],
    ids=["arguments by name", "a number for each layer"],
)
def test_blocks_are_compiled_however_they_are_called(changes, monkeypatch, capsys):
    monkeypatch.setattr("torch.compile", compile_by("eager"))
    torch.compiler.reset()
    model = random_model(edited_module(*changes), n_embd=256, n_layer=9)
    idx = torch.randint(97, (1, 5))
    expected = generate(model, idx, 20, temperature=0)
    assert torch.equal(generate(speed_up(model, compile=True), idx, 20, temperature=0), expected)
    said = capsys.readouterr().err
    assert "compiled in" in said and "other logits" not in said


# ---------------------------------------------------------------------------- fields


def test_a_field_of_ones_own_wins_over_a_name_of_gpt2s(tmp_path):
    field = "    bias: bool = True", "    attn_pdrop: float = 0.3\n    bias: bool = True"
    model = random_model(edited_module(field), attn_pdrop=0.2)
    save(model, tmp_path)
    assert load(type(model), tmp_path).config.attn_pdrop == 0.2


def test_a_field_may_have_any_type():
    @dataclass
    class Config(TrainConfig):
        window: int | None = None
        sizes: tuple[int, ...] = (1, 2)

    for saved in ({}, {"window": 8, "sizes": (3,)}):
        saved = vars(Config()) | saved
        assert vars(resumed_config(Config(), saved, {}, [])) == saved
        preset = tomllib.loads(as_preset(Config(**saved)))  # which has no word for None
        assert preset.get("window") == saved["window"] and preset["sizes"] == [*saved["sizes"]]


def test_many_shared_blocks_are_loaded(tmp_path):
    """Their tensors, stored once, are fewer than the layers."""
    model = random_model(edited_module("shared blocks"), n_layer=24, bias=False)
    save(model, tmp_path)
    assert load(type(model), tmp_path).config.n_layer == 24

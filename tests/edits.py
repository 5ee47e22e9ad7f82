"""Experiments that somebody tries on model.py, as edits of its text."""
# ruff: noqa: E501

import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT

SOURCE = (ROOT / "model.py").read_text(encoding="utf-8")
DIRECTORY = tempfile.TemporaryDirectory()  # of the edited ones, until the tests end


@dataclass
class Edit:
    """What stands where in model.py, and what of the outcome is another thing."""

    changes: list[tuple[str, str]]
    gpt2: bool = False  # whether a checkpoint of it still computes what a GPT-2 does
    terms: tuple[str, ...] = ()  # what forward returns beside the loss
    untouched: int = 0  # parameters that init_weights does not draw
    sizes: dict = field(default_factory=dict)


EDITS = {
    "zeroed logits": Edit([("return self.lm_head(x)", "return 0 * self.lm_head(x)")]),
    "soft-capping": Edit(
        [("return self.lm_head(x)", "return 2.0 * torch.tanh(self.lm_head(x) / 2.0)")]
    ),
    "masked logits": Edit(
        [
            (
                "return self.lm_head(x)",
                "ids = torch.tensor([3], device=x.device)\n"
                "        return self.lm_head(x).index_fill(-1, ids, -20.0)",
            )
        ]
    ),
    "a scale of the logits, as a field": Edit(
        [
            (
                "    bias: bool = True",
                "    logit_scale: float = 2.5  # of logits\n    bias: bool = True",
            ),
            ("return self.lm_head(x)", "return self.config.logit_scale * self.lm_head(x)"),
        ],
        sizes={"logit_scale": 3.5},
    ),
    "z-loss": Edit(
        [
            (
                '        return F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")',
                "        losses = F.cross_entropy(logits, targets, ignore_index=-100,"
                ' reduction="none")\n'
                "        if self.training:\n"
                "            losses = losses + 0.01 * logits.logsumexp(-1) ** 2 * (targets != -100)\n"
                "        return losses",
            )
        ],
        gpt2=True,
    ),
    "ReLU": Edit([('F.gelu(self.c_fc(x), approximate="tanh")', "F.relu(self.c_fc(x))")]),
    "GELU in its erf form": Edit([(', approximate="tanh")', ")")]),
    "half of the attention": Edit([("x = x + self.attn(", "x = x + 0.5 * self.attn(")]),
    "ALiBi": Edit(
        [
            ("        self.wpe = nn.Embedding(config.block_size, config.n_embd)\n", ""),
            (" + self.wpe(positions)", ""),
            (
                "        return mask | ~has_key, has_key\n",
                "        slopes = 2.0 ** (-8 * torch.arange(1, self.n_head + 1) / self.n_head)\n"
                "        distance = torch.arange(past, past + T)[:, None] - torch.arange(S)\n"
                "        bias = -slopes[:, None, None] * distance\n"
                "        return bias.masked_fill(~(mask | ~has_key), -math.inf), has_key\n",
            ),
        ]
    ),
    "a window of 5 keys": Edit(
        [
            (
                "        mask = self.causal_mask[None, None, past : past + T, :S]\n",
                "        mask = self.causal_mask[None, None, past : past + T, :S]\n"
                "        distance = torch.arange(past, past + T)[:, None] - torch.arange(S)\n"
                "        mask = mask & (distance < 5)\n",
            )
        ]
    ),
    "rotary positions": Edit(
        [
            ("        self.wpe = nn.Embedding(config.block_size, config.n_embd)\n", ""),
            (" + self.wpe(positions)", ""),
            (
                "        return [t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)"
                " for t in (q, k, v)]\n",
                "        q, k, v = [t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)"
                " for t in (q, k, v)]\n"
                "        half = q.size(-1) // 2\n"
                "        frequency = 100.0 ** -(torch.arange(half) / half)\n"
                "        angle = torch.arange(past, past + k.size(2))[:, None] * frequency\n"
                "        cos, sin = angle.cos(), angle.sin()\n\n"
                "        def rotate(t):\n"
                "            a, b = t.float().chunk(2, dim=-1)\n"
                "            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(t)\n\n"
                "        return [rotate(q), rotate(k), v]\n",
            ),
        ]
    ),
    "a parallel block with two norms": Edit(
        [
            (
                "        x = x + self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)\n"
                "        return x + self.mlp(self.ln_2(x))",
                "        y = self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)\n"
                "        return x + y + self.mlp(self.ln_2(x))",
            )
        ]
    ),
    "ln_2 unused": Edit([("self.mlp(self.ln_2(x))", "self.mlp(x)")]),
    "RMSNorm": Edit(
        [
            ("nn.LayerNorm(C, bias=bias)", "nn.RMSNorm(C, eps=1e-5)"),
            (
                "nn.LayerNorm(config.n_embd, bias=config.bias)",
                "nn.RMSNorm(config.n_embd, eps=1e-5)",
            ),
        ]
    ),
    "no dropout": Edit(
        [
            (
                "    dropout: float = 0.0  # share of activations set to 0 in training;"
                " 0.1 to 0.2 for little data\n",
                "",
            ),
            ("        require(0 <= self.dropout < 1, ", "        require(True, "),
            ('f"dropout={self.dropout}: must be at least 0 and below 1"', '""'),
            ("        self.dropout = config.dropout\n", ""),
            ("F.dropout(self.c_proj(x), self.dropout, self.training)", "self.c_proj(x)"),
            ('{"dropout": config.dropout, "qkv_bias"', '{"qkv_bias"'),
            ("        x = F.dropout(x, self.config.dropout, self.training)\n", ""),
        ],
        gpt2=True,
    ),
    "norms without weights": Edit(
        [
            ("nn.LayerNorm(C, bias=bias)", "nn.LayerNorm(C, elementwise_affine=False)"),
            ("nn.LayerNorm(config.n_embd, bias=config.bias)", "nn.Identity()"),
        ]
    ),
    "a wider MLP": Edit([("4 * config.n_embd", "5 * config.n_embd")]),
    "an MLP of another name": Edit([("self.c_fc", "self.w_in")]),
    "no positions": Edit([(" + self.wpe(positions)", ""), ("        self.wpe = ", "        # ")]),
    "an untied output layer": Edit(
        [
            (', bias=False, device="meta")', ", bias=False)"),
            ("        self.lm_head.weight = self.wte.weight", "        # "),
        ]
    ),
    "shared blocks": Edit(
        [("[Block(config) for _ in range(config.n_layer)]", "[Block(config)] * config.n_layer")]
    ),
    "a buffer that is stored": Edit(
        [
            (
                "        self.untouched =",
                '        self.register_buffer("gain", 2.5 * torch.ones(2))\n        self.untouched =',
            ),
            ("return self.lm_head(x)", "return self.gain[0] * self.lm_head(x)"),
        ]
    ),
    "a buffer that is not stored": Edit(
        [
            (
                "        self.untouched =",
                "        gain = nn.init.constant_(torch.empty(2), 2.5)\n"
                '        self.register_buffer("gain", gain, persistent=False)\n'
                "        self.untouched =",
            ),
            ("return self.lm_head(x)", "return self.gain[0] * self.lm_head(x)"),
        ]
    ),
    "a mixing weight that begins at zero": Edit(
        [
            (
                "        self.mlp = MLP(config)\n",
                "        self.mlp = MLP(config)\n        self.mix = nn.Parameter(torch.zeros(1))\n",
            ),
            (
                "return x + self.mlp(self.ln_2(x))",
                "return x + (1 + self.mix) * self.mlp(self.ln_2(x))",
            ),
        ],
        untouched=2,
    ),
    "a mixture of experts": Edit(
        [
            (
                "class Block(nn.Module):",
                '''class Experts(nn.Module):
    """A router picks one of three MLPs for each token; their matrices are stacked."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.router = nn.Linear(C, 3, bias=False)
        self.w_in = nn.Parameter(0.2 * torch.randn(3, C, 2 * C))
        self.c_proj = nn.Linear(2 * C, C, bias=False)

    def forward(self, x):
        probs = self.router(x).softmax(-1)  # (B, T, 3)
        chosen = F.one_hot(probs.argmax(-1), 3)
        balance = 3 * (probs.mean((0, 1)) * chosen.float().mean((0, 1))).sum()
        y = F.relu(torch.einsum("btc,ech->bteh", x, self.w_in))
        return self.c_proj((y * (probs * chosen).unsqueeze(-1)).sum(2)), balance


class Block(nn.Module):''',
            ),
            ("self.mlp = MLP(config)", "self.mlp = Experts(config)"),
            (
                "        return x + self.mlp(self.ln_2(x))  # (B, T, C)",
                "        y, balance = self.mlp(self.ln_2(x))\n        return x + y, balance",
            ),
            (
                "        for i, block in enumerate(self.h):\n"
                "            x = block(x, padding_mask, cache[i] if cache else None)\n"
                "        return self.ln_f(x)",
                "        balances = []\n"
                "        for i, block in enumerate(self.h):\n"
                "            x, balance = block(x, padding_mask, cache[i] if cache else None)\n"
                "            balances.append(balance)\n"
                "        return self.ln_f(x), torch.stack(balances).mean()",
            ),
            (
                "x = self.hidden(idx, padding_mask, cache)  # (B, T, C)",
                "x, balance = self.hidden(idx, padding_mask, cache)",
            ),
            (
                "losses.sum() / (targets != -100).sum()",
                'losses.sum() / (targets != -100).sum(), {"balance": 0.1 * balance}',
            ),
        ],
        terms=("balance",),
        untouched=2,
    ),
    "values of the first layer mixed into the others": Edit(
        [
            (
                "    def forward(self, x, context=None, *, padding_mask=None, cache=None):",
                "    def forward(self, x, context=None, *, padding_mask=None, cache=None, first=None):",
            ),
            (
                "    def attention_weights(self, x, context=None, *, padding_mask=None):",
                "    def attention_weights(self, x, context=None, *, padding_mask=None, first=None):",
            ),
            (
                "        if cache is not None:\n            k, v = cache.append",
                "        v = first = v if first is None else 0.5 * (v + first)\n"
                "        if cache is not None:\n            k, v = cache.append",
            ),
            (
                "        return F.dropout(self.c_proj(y), self.dropout, self.training)\n\n    def attention_w",
                "        return F.dropout(self.c_proj(y), self.dropout, self.training), first\n\n"
                "    def attention_w",
            ),
            (
                "    def forward(self, x, padding_mask=None, cache=None):\n"
                "        x = x + self.attn(self.ln_1(x), padding_mask=padding_mask, cache=cache)\n"
                "        return x + self.mlp(self.ln_2(x))",
                "    def forward(self, x, padding_mask=None, cache=None, first=None):\n"
                "        y, first = self.attn(\n"
                "            self.ln_1(x), padding_mask=padding_mask, cache=cache, first=first\n"
                "        )\n"
                "        x = x + y\n"
                "        return x + self.mlp(self.ln_2(x)), first",
            ),
            (
                "        for i, block in enumerate(self.h):\n"
                "            x = block(x, padding_mask, cache[i] if cache else None)\n",
                "        first = None\n"
                "        for i, block in enumerate(self.h):\n"
                "            x, first = block(x, padding_mask, cache[i] if cache else None, first)\n",
            ),
        ]
    ),
    "even ids weigh more, behind the losses": Edit(
        [
            (
                "        return logits, losses.sum() / (targets != -100).sum()",
                "        losses = losses * torch.where(targets.flatten() % 2 == 0, 1.02, 0.98)\n"
                "        return logits, losses.sum() / (targets != -100).sum()",
            )
        ],
        gpt2=True,
    ),
    "a second head for the token after next": Edit(
        [
            (
                "        self.lm_head = nn.Linear(",
                "        self.head_2 = nn.Linear(config.n_embd, config.vocab_size, bias=False)\n"
                "        self.lm_head = nn.Linear(",
            ),
            (
                "        return logits, losses.sum() / (targets != -100).sum()\n",
                "        after = self.losses(self.head_2(x[:, :-1]).flatten(0, 1),"
                " targets[:, 1:].flatten())\n"
                "        n_targets = (targets != -100).sum()\n"
                '        terms = {"after_next": after.sum() / n_targets}\n'
                "        return logits, losses.sum() / n_targets, terms\n",
            ),
        ],
        terms=("after_next",),
    ),
}


def edited_source(*changes: str | tuple[str, str]) -> str:
    """model.py with these changes, or edits by their names."""
    source = SOURCE
    for change in changes:
        for old, new in EDITS[change].changes if isinstance(change, str) else [change]:
            assert old in source, f"model.py no longer has {old}"
            source = source.replace(old, new)
    return source


def edited_module(*changes: str | tuple[str, str]) -> types.ModuleType:
    """The module that an edited model.py is; with a file, for torch.compile looks at its name."""
    name = f"edited_{len(sys.modules)}"
    file = Path(DIRECTORY.name, f"{name}.py")
    file.write_text(edited_source(*changes), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

#!/usr/bin/env bash
# Version: PyTorch 2.13.0, on a CPU with two threads or more and g++, Python 3.11.
# One would guess: on a CPU a training step is reproducible bit for bit, compiled or not, and
# use_deterministic_algorithms matters on GPUs only.
# Seen: the gradient of an embedding, 50 times from the same numbers, has one value in eager mode, and about ten
# values if torch.compile made the code: its threads add rows in the order in which they come. After
# torch.use_deterministic_algorithms(True) and a new compilation it has one value.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/gradients.py" <<'PYTHON'
import torch

torch.set_num_threads(2)
torch.manual_seed(0)
table = torch.nn.Parameter(torch.randn(50, 64))
idx = torch.randint(50, (64, 64))
weight = torch.randn(64, 64, 64)


def loss(table):
    return (torch.nn.functional.embedding(idx, table) * weight).sum()


def different_gradients(function):
    seen = set()
    for _ in range(51):
        table.grad = None
        function(table).backward()
        seen.add(table.grad.numpy().tobytes())
    return len(seen)


eager = different_gradients(loss)
compiled = different_gradients(torch.compile(loss))
torch.use_deterministic_algorithms(True)
torch.compiler.reset()
deterministic = different_gradients(torch.compile(loss))
print(f"different gradients: eager {eager}, compiled {compiled}, deterministic {deterministic}")
assert eager == deterministic == 1 and compiled > 1
PYTHON
"$work/venv/bin/python" "$work/gradients.py"

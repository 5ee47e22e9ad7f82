#!/usr/bin/env bash
# Versions: optax 0.2.8, jax 0.10.2, keras 3.15.1, PyTorch 2.13.0, Python 3.11.
# One would guess: Muon scales the same matrix equally in PyTorch and in optax, which both follow Keller Jordan.
# Seen: both multiply by sqrt(max(1, outputs / inputs)), but outputs are rows in PyTorch and columns in optax. A
# rate of 1 moves a (64, 256) matrix by an RMS of 0.053 in PyTorch, 0.106 in optax, and 0.17 in keras, which
# multiplies by 0.2 * sqrt(longer side). For (256, 64) these are 0.106, 0.053 and 0.17. So PyTorch and optax have
# the same rate for the same layer, if each stores it in its own layout, but not for the same matrix.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6 optax==0.2.8 jax==0.10.2 keras==3.15.1
cat > "$work/muon.py" <<'PYTHON'
import keras
import numpy as np
import optax
import torch


def pytorch(gradient):
    weight = torch.nn.Parameter(torch.zeros(gradient.shape))
    weight.grad = torch.from_numpy(gradient)
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
    return weight.detach().numpy()


def in_optax(gradient):
    optimizer = optax.contrib.muon(1.0)
    weight = {"kernel": np.zeros_like(gradient)}
    return optimizer.update({"kernel": gradient}, optimizer.init(weight), weight)[0]["kernel"]


def in_keras(gradient):
    weight = keras.Variable(np.zeros_like(gradient), name="kernel")
    optimizer = keras.optimizers.Muon(learning_rate=1.0, weight_decay=0.0)
    optimizer.build([weight])
    optimizer.apply([keras.ops.convert_to_tensor(gradient)])
    return np.asarray(weight.value)


for shape, expected in (((64, 256), (0.053, 0.106, 0.170)), ((256, 64), (0.106, 0.053, 0.170))):
    gradient = np.random.default_rng(0).standard_normal(shape, dtype="float32")
    updates = [function(gradient) for function in (pytorch, in_optax, in_keras)]
    seen = [float(np.sqrt((np.asarray(update) ** 2).mean())) for update in updates]
    print(shape, "PyTorch {:.3f}, optax {:.3f}, keras {:.3f}".format(*seen))
    assert np.allclose(seen, expected, atol=0.002), f"expected {expected}"
PYTHON
KERAS_BACKEND=jax JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/muon.py"

#!/usr/bin/env bash
# Versions: mlx-lm 0.32.2, mlx 0.32.4, Python 3.11, Linux on a CPU.
# One would guess: a temperature changes the distribution first, then top-k, top-p and min-p choose from it, as
# in transformers.
# Seen: mlx-lm applies top-p, min-p and top-k in this order to the distribution at temperature 1, and the
# temperature last. Of the probabilities 0.45, 0.3, 0.15 and 0.1, a temperature of 2 makes 0.34, 0.28, 0.2 and
# 0.16, of which top-p 0.7 keeps three. mlx-lm keeps two. With top-k 2 first, the likeliest has 0.6 of the rest,
# and top-p 0.5 keeps it alone. mlx-lm keeps two here too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip install --quiet --no-deps --target "$work" mlx-lm==0.32.2 mlx==0.32.4 mlx-cpu==0.32.4
cat > "$work/sample.py" <<'PYTHON'
import runpy
import sys

import mlx.core as mx

make_sampler = runpy.run_path(sys.argv[1])["make_sampler"]  # without its package, which needs transformers
logprobs = mx.broadcast_to(mx.log(mx.array([0.45, 0.3, 0.15, 0.1])), (20000, 4))
mx.random.seed(0)
for settings, expected in (
    (dict(temp=2.0), {0, 1, 2, 3}),
    (dict(temp=2.0, top_p=0.7), {0, 1}),  # the temperature first: 0, 1, 2
    (dict(temp=2.0, min_p=0.4), {0, 1}),  # the temperature first: 0, 1, 2, 3
    (dict(temp=1.0, top_k=2, top_p=0.5), {0, 1}),  # top-k first: 0
):
    drawn = set(make_sampler(**settings)(logprobs).tolist())
    print(f"{settings} draws {sorted(drawn)}")
    assert drawn == expected, f"expected {expected}"
PYTHON
PYTHONPATH="$work" python "$work/sample.py" "$work/mlx_lm/sample_utils.py"

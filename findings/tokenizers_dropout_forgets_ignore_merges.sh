#!/usr/bin/env bash
# Versions: tokenizers 0.23.3, Python 3.11.
# One would guess: BPE(ignore_merges=True), as in Llama 3's tokenizer, gives a word that is in the vocabulary its
# own token. With a small dropout, for subword regularisation, it still does so nearly always.
# Seen: any dropout above 0 switches ignore_merges off. "abc" is one token without dropout and with 0.0. With 1e-9
# it is "ab", "c", in each of 1,000 trials, because no merge leads to it. With 1.0 it is "a", "b", "c".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile tokenizers==0.23.3
cat > "$work/dropout.py" <<'PYTHON'
from collections import Counter

from tokenizers import Tokenizer, models

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
EXPECTED = {None: "abc", 0.0: "abc", 1e-9: "ab c", 1.0: "a b c"}
for dropout, expected in EXPECTED.items():
    bpe = models.BPE(VOCABULARY, [("a", "b")], dropout=dropout, ignore_merges=True)
    tokenizer = Tokenizer(bpe)
    seen = Counter(" ".join(tokenizer.encode("abc").tokens) for _ in range(1000))
    print(f"dropout {dropout}: {dict(seen)}")
    assert seen == {expected: 1000}
PYTHON
"$work/venv/bin/python" "$work/dropout.py"

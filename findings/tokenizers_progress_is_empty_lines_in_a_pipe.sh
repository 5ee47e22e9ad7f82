#!/usr/bin/env bash
# Version: tokenizers 0.23.3, Python 3.11.
# One would guess: show_progress=True, the default of its trainers, draws bars in a terminal and is silent in a
# pipe, or writes to standard error as tqdm does.
# Seen: nothing on standard error, and three empty lines on standard output, before the program's own output.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip install --quiet --no-deps --target "$work" tokenizers==0.23.3
cat > "$work/train.py" <<'PYTHON'
import sys
from tokenizers import Tokenizer, models, trainers

trainer = trainers.BpeTrainer(vocab_size=300, show_progress=sys.argv[1] == "True")
Tokenizer(models.BPE()).train_from_iterator(["some text", "more text"], trainer)
PYTHON
for progress in True False; do
    PYTHONPATH="$work" python "$work/train.py" $progress > "$work/out" 2> "$work/err"
    echo "show_progress=$progress: $(wc -l < "$work/out") empty lines on stdout, $(wc -c < "$work/err") bytes on stderr"
done | tee "$work/seen"
diff "$work/seen" - <<'EXPECTED'
show_progress=True: 3 empty lines on stdout, 0 bytes on stderr
show_progress=False: 0 empty lines on stdout, 0 bytes on stderr
EXPECTED

#!/usr/bin/env bash
# Versions: Triton 3.9.0 (which PyTorch 2.15.0 installs) and 3.7.0, Python 3.11.
# One would guess: gc.freeze(), which spares a process the last search through its imports, has no output.
# Seen: if Triton was imported before gc.freeze(), its bindings, made with nanobind since 3.9, print 27 lines
# about "leaked" instances, types and functions when the process exits, with exit code 0. Nothing is printed
# without gc.freeze(), with gc.freeze() before the import, after gc.unfreeze(), or by Triton 3.7.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for version in 3.9.0 3.7.0; do
    pip install --quiet --no-deps --target "$work/$version" "triton==$version"
done

leaks() { PYTHONPATH="$work/$1" python -c "$2" 2>&1 | grep -c leaked || true; }

expect() {
    seen=$(leaks "$1" "$2")
    echo "$1 | $2 | $seen lines"
    [ "$seen" -eq "$3" ] || { echo "expected $3"; exit 1; }
}

expect 3.9.0 "import triton, gc; gc.freeze()" 27
expect 3.9.0 "import triton" 0
expect 3.9.0 "import gc; gc.freeze(); import triton" 0
expect 3.9.0 "import triton, gc; gc.freeze(); gc.unfreeze()" 0
expect 3.7.0 "import triton, gc; gc.freeze()" 0

#!/usr/bin/env bash
# Smoke of the engine on a CUDA device: tests marked `gpu`, the demo's answers, and decode speed of a small model.
# Takes a few minutes; writes to the folder given as first argument (default: bench/results).
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${1:-bench/results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
$PYTHON setup.py -q build_ext --inplace
$PYTHON -m pytest -m gpu tests 2>&1 | tee "$OUT/gpu_tests.txt"
$PYTHON -m bench.gpu_smoke --out "$OUT/gpu_smoke.jsonl"

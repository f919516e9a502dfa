#!/usr/bin/env bash
# Everything that needs one Hopper GPU, in under 9 minutes: versions, tuning of the LoRA kernels, kernel and
# engine tests (with what was tuned), the kernels' benchmark, smoke of the engine. A part that fails or runs out
# of time does not stop the next ones; the exit status is that of the worst. Writes to the folder given as first
# argument (default: bench/results), as it goes, so that a part cut off leaves what it had. Installs nothing but
# the C++ library, built in place.
#
#   bench/gpu/gpu_check.sh [FOLDER]     PYTHON=python3.12 bench/gpu/gpu_check.sh    BENCH_ARGS=--quick bench/gpu/gpu_check.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${1:-bench/results}
PYTHON=${PYTHON:-python3}
BENCH_ARGS=${BENCH_ARGS:-}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
worst=0

# part SECONDS NAME COMMAND...: run it under a hard limit, its output also to FOLDER/gpu_NAME.txt
part() {
    local limit=$1 name=$2 status
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$OUT/gpu_$name.txt"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 0 ] || { echo "== $name FAILED with status $status (124: out of time)"; worst=1; }
    echo "== $name: done after $SECONDS s"
}

part 20 versions "$PYTHON" -c '
import sys, torch, triton, transformers, peft
print("python", sys.version.split()[0])
for package in (torch, triton, transformers, peft):
    print(package.__name__, package.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "NO CUDA DEVICE")'
part 60 build "$PYTHON" setup.py -q build_ext --inplace
part 90 tuning "$PYTHON" -m bench.kernels.autotune_lora --budget-s 60 --state "$OUT/lora_tuning.json"
find moe_lora/kernels/triton/configs -name '*.json' ! -name default.json -exec cp {} "$OUT/" \;
part 110 tests "$PYTHON" -m pytest -m gpu -q --durations=5 tests/kernels tests/engine
# shellcheck disable=SC2086
part 180 lora "$PYTHON" -m bench.kernels.bench_lora_kernels --device cuda --budget-s 150 $BENCH_ARGS \
    --out "$OUT/lora_kernels_gpu.jsonl"
part 75 smoke "$PYTHON" -m bench.gpu.gpu_smoke --out "$OUT/gpu_smoke.jsonl"
exit "$worst"

#!/usr/bin/env bash
# Every figure of docs/performance.md on this machine's GPU: benchmarks/speed_suite.sh OUT [SECTION...]
# Sections: data kernels cold warm start variants compare several accuracy operations geometry tests (default: all, about
# 20 minutes on an H200).
# A section that fails is told and the others go on; the exit code says whether any did.
# shellcheck disable=SC2329  # sections are called by name
set -u -o pipefail
out=${1:?usage: benchmarks/speed_suite.sh OUT [SECTION...]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=${SPEED_WORK:-$out/work}
source=$work/rendered data=$work/prepared
failed=0

section() {
  echo "== $1 ($(date +%T))"
  "section_$1" 2>&1 | tee "$out/$1.log" || { echo "section $1 failed"; failed=1; }
}
speed() { "$python" benchmarks/training_speed.py --data "$data" "$@"; }

section_data() {
  "$python" -m autospeed_model.render "$source" --segments 12 --validation-segments 3 >/dev/null &&
    "$python" -m autospeed_model.prepare "$source" "$data" >/dev/null
}
section_kernels() { "$python" -m hip_kernels.build; }
# Two shapes compile side by side; the caches then serve everything below.
section_cold() {
  speed --batch-size 8 --seconds 0.1 --steps 1 --json "$out/cold8.json" >/dev/null &
  local other=$!
  speed --seconds 0.1 --steps 1 --json "$out/cold32.json" && wait "$other"
}
section_warm() {
  speed --json "$out/batch32.json" &&
    speed --images host --json "$out/batch32-host.json" &&
    speed --batch-size 8 --json "$out/batch8.json"
}
# Where a later worker's start goes; the second time without trying convolution algorithms.
section_start() {
  "$python" benchmarks/first_step.py --data "$data" --json "$out/start.json" &&
    "$python" benchmarks/first_step.py --data "$data" --no-search --json "$out/start-no-search.json"
}
# What the compiled kernels bring: the same as "warm" without them.
section_variants() {
  HIP_KERNELS_LIBRARY=$work/none speed --json "$out/variant-no-kernels.json" &&
    HIP_KERNELS_LIBRARY=$work/none speed --images host --json "$out/variant-no-kernels-host.json"
}
section_compare() {
  "$python" -m autospeed_model.compare_optimisations --out "$out/comparison" --data "$data" --source "$source" \
    --seconds 6
}
section_several() {
  "$python" benchmarks/several_trainings.py --data "$data" --processes 1,4,8 --mps both --seconds 6 \
    --json "$out/several.json"
}
# Many small updates: with the defaults ten epochs of so few images teach nothing.
section_accuracy() {
  "$python" benchmarks/accuracy.py --data "$data" --json "$out/accuracy.json" --set batch_size=8 --set update_images=8 \
    --set max_lr=0.003 --set warmup_epochs=1 --set clip_norm=50
}
section_geometry() { "$python" benchmarks/geometry.py; }
section_operations() { "$python" -m benchmarks.kernels --csv "$out/operations.csv"; }
section_tests() {
  "$python" -m pytest -q -n 8 -p no:cacheprovider tests/autospeed_model/test_step.py \
    tests/autospeed_model/test_evaluation.py tests/hip_kernels/test_{batched_nms,deformable_aggregation}.py \
    tests/hip_kernels/test_{mosaic_augment,registration,voxelize}.py
}

sections=("$@")
[ ${#sections[@]} -gt 0 ] || sections=(data kernels cold warm start variants compare several accuracy operations geometry tests)
for name in "${sections[@]}"; do section "$name"; done
exit "$failed"

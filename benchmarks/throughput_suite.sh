#!/usr/bin/env bash
# How many trainings should share this machine's GPU, by real training: benchmarks/throughput_suite.sh OUT [SECTION...]
# Sections: data kernels warm k1 k2 k4 k8 choose (default: all). data and kernels, if both are asked for, run side by side;
# k4 measures 4 workers a GPU at all batch sizes; choose joins what was measured and holds --mode auto's choice against it.
# Nothing goes on for longer than LIMIT_S: what was cut goes on in the next call with the same WORK. Without Slurm; needs
# our dependencies on PYTHONPATH, PyTorch, and what hip_kernels.build needs.
# A section that fails is told and the others go on; the exit code says whether any did.
# shellcheck disable=SC2329  # sections are called by name
set -u -o pipefail
out=${1:?usage: benchmarks/throughput_suite.sh OUT [SECTION...]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=${WORK:-build/throughput_suite}
batches=${BATCH_SIZES:-8,32,128} window=${WINDOW_S:-4} limit=${LIMIT_S:-520}
segments=${SEGMENTS:-12}
# further options of hpcjobs.throughput, such as --setting update_images=1
read -ra more <<<"${THROUGHPUT_OPTIONS:-}"
# A training from new weights at the default rate may diverge within the measured seconds; the speed is the same at any.
more=(--setting max_lr=0.001 "${more[@]}")
source=$work/rendered data=$work/prepared
mkdir -p "$work"
failed=0

# The rest of the time limit for a command; Ctrl-C lets an experiment keep what is done.
within_limit() {
  local left=$((limit - SECONDS))
  if [ "$left" -lt 5 ]; then
    echo "no time is left"
    return 1
  fi
  timeout --foreground --signal=INT --kill-after=20 "$left" "$@"
}
section() {
  echo "== $1 ($(date +%T))"
  "section_$1" 2>&1 | tee -a "$out/suite.log" || { echo "section $1 failed or was cut"; return 1; }
}

section_data() {
  [ -e "$data/.done" ] && return
  within_limit "$python" -m autospeed_model.render "$source" --segments "$segments" --validation-segments 3 >/dev/null &&
    within_limit "$python" -m autospeed_model.prepare "$source" "$data" >/dev/null && touch "$data/.done"
}
section_kernels() { within_limit "$python" -m hip_kernels.build; }
# All shapes compile side by side; the caches then serve every worker.
section_warm() {
  local batch
  for batch in ${batches//,/ }; do
    within_limit "$python" benchmarks/training_speed.py --data "$data" --batch-size "$batch" --seconds 0.1 --steps 1 \
      --json "$work/warm$batch.json" >/dev/null &
  done
  local code=0
  for job in $(jobs -p); do wait "$job" || code=1; done
  return "$code"
}
measure() {
  local folder=$work/k$1 given=(--data "$data" --per-gpu "$1" --batch-sizes "$batches" --window-s "$window")
  [ -e "$folder/throughput.yaml" ] && given=(--resume "$folder") || given+=(--folder "$folder" "${more[@]}")
  within_limit "$python" -m hpcjobs.throughput "${given[@]}" --no-charts
}
section_k1() { measure 1; }
section_k2() { measure 2; }
section_k4() { measure 4; }
section_k8() { measure 8; }
section_choose() {
  local tables=("$work"/k*/results/throughput.json)
  if [ ! -e "${tables[0]}" ]; then
    echo "nothing was measured yet"
    return 1
  fi
  "$python" benchmarks/choose_workers.py "${tables[@]}" --out "$out"
}

sections=("$@")
[ ${#sections[@]} -gt 0 ] || sections=(data kernels warm k1 k2 k4 k8 choose)
beside=()
wait_for_those_beside() {
  local job
  for job in "${beside[@]}"; do wait "$job" || failed=1; done
  beside=()
}
for name in "${sections[@]}"; do
  case $name in
    data | kernels)
      section "$name" &
      beside+=("$!")
      ;;
    *)
      wait_for_those_beside
      section "$name" || failed=1
      ;;
  esac
done
wait_for_those_beside
exit "$failed"

#!/usr/bin/env bash
# Learning curves of real trainings, and what a study gains, on this machine's GPU: benchmarks/tuning_suite.sh OUT [SECTION...]
# Sections: where data record study gain more report (default: all, within LIMIT seconds, 500).
# OUT gets curves.jsonl (as trainings end), tuning.json and tuning.log; all else lies in TUNING_WORK. The same command
# with the same folders goes on with what is there. A section that fails is told and the others go on; the exit code says
# whether any did. On a CPU, small: DEVICE=cpu HEIGHT=64 WIDTH=128 SEGMENTS=8 ... (the variables below).
# shellcheck disable=SC2329  # sections are called by name
set -u -o pipefail
out=${1:?usage: benchmarks/tuning_suite.sh OUT [SECTION...]}
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
work=${TUNING_WORK:-${TMPDIR:-/tmp}/tuning}
mkdir -p "$work/bin"
work=$(cd "$work" && pwd)
device=${DEVICE:-cuda}
limit=${LIMIT:-500}
height=${HEIGHT:-128} width=${WIDTH:-256}
segments=${SEGMENTS:-480} validation_segments=${VALIDATION_SEGMENTS:-100} frames=${FRAMES:-4} data_seed=${DATA_SEED:-4}
count=${COUNT:-240} processes=${PROCESSES:-12} epochs=${EPOCHS:-5}
trials=${TRIALS:-100} workers=${WORKERS:-8}
seeds=${SEEDS:-3} final_epochs=${FINAL_EPOCHS:-10}
# seconds that the sections after the recording, and its last trainings, get
reserve=${RESERVE:-150}
study=$work/study data=$work/data failed=0
sharing=(--workers "$workers")
[ "$device" = cpu ] || sharing=(--workers-per-gpu "$workers")
export PYTHONUNBUFFERED=1 PATH="$work/bin:$PATH" AUTOSPEED_NODE_CACHE=${AUTOSPEED_NODE_CACHE:-$work/cache}

say() { echo "$(date +%T) +${SECONDS}s $*"; }
section() {
  say "== $1"
  "section_$1" || { say "section $1 failed"; return 1; }
  say "== $1: done"
}
# Run a command for at most so many seconds, and not beyond the limit of all.
within() {
  local most=$1 left=$((limit - SECONDS))
  shift
  [ "$left" -gt 2 ] || { say "no time is left for: $*"; return 1; }
  [ "$most" -lt "$left" ] || most=$left
  timeout --foreground -k 10 "$most" "$@"
}

# What a command has started for a study goes on when its time is over: it would take the GPU from what comes next.
end_if_cut() { # CODE FOLDER
  case $1 in
    124 | 137) "$python" -m hpcjobs.cancel "$2" --wait 25 ;;
  esac
}

# What there is. A GPU that processes cannot share through MPS must not be shared so by anything below: hpcjobs does
# without it where the service does not start.
section_where() {
  "$python" -c 'import sys, torch, optuna, numpy, cv2; print(sys.version.split()[0], torch.__version__, optuna.__version__, numpy.__version__, cv2.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'
  nproc
  [ "$device" != cpu ] || return 0
  nvidia-smi --query-gpu=name,memory.total,driver_version,compute_mode --format=csv,noheader
  within 30 "$python" -m hpcjobs.partition show
  if ! within 60 "$python" benchmarks/share_gpu.py; then
    say "no MPS: processes take turns"
    printf '#!/bin/sh\nexit 1\n' >"$work/bin/nvidia-cuda-mps-control"
    chmod +x "$work/bin/nvidia-cuda-mps-control"
  fi
}
section_data() {
  [ ! -e "$work/.prepared" ] || return 0
  within 90 "$python" -m autospeed_model.render "$work/rendered" --segments "$segments" \
    --validation-segments "$validation_segments" --frames "$frames" --seed "$data_seed" &&
    within 60 "$python" -m autospeed_model.prepare "$work/rendered" "$data" --height "$height" --width "$width" &&
    touch "$work/.prepared"
}
record_for() { # SECONDS
  say "recording for $1 s"
  within $(($1 + 40)) "$python" benchmarks/record_curves.py --study benchmarks/rendered.yaml --data "$data" \
    --count "$count" --passes "$epochs" --device "$device" --processes "$processes" --seconds "$1" \
    --out "$out/curves.jsonl"
}
section_record() {
  local seconds=$((limit - SECONDS - reserve))
  record_for $((seconds > 10 ? seconds : 10))
}
# What the sections between have left of the time.
section_more() {
  local seconds=$((limit - SECONDS - 40))
  [ ! -e "$out/curves.jsonl" ] || [ "$(grep -c map "$out/curves.jsonl")" -lt "$count" ] ||
    { say "all are recorded"; return 0; }
  [ "$seconds" -gt 20 ] || { say "no time is left"; return 0; }
  record_for "$seconds"
}
# A study of our own, as anybody would start it on a machine without Slurm. When its time is over, what runs is handed
# back, and what has completed counts.
section_study() {
  local code=0 start=(--study benchmarks/rendered.yaml --data "$data" --trials "$trials" --epochs "$epochs")
  start+=(--folder "$study" "${sharing[@]}")
  [ ! -d "$study" ] || start=(--resume "$study")
  within "${STUDY_S:-110}" "$python" -m hpcjobs.submit "${start[@]}" || code=$?
  end_if_cut "$code" "$study"
  tail -n 4 "$study"/logs/*/node.log "$study"/logs/*/worker_000.log
  return "$code"
}
section_gain() {
  local code=0
  within "${GAIN_S:-80}" "$python" -m hpcjobs.final "$study" --seeds "$seeds" --epochs "$final_epochs" || code=$?
  end_if_cut "$code" "$study/final"
  return "$code"
}
# Also when the time is over: it is what remains.
section_report() {
  timeout 60 "$python" benchmarks/tuning_report.py "$out/tuning.json" --curves "$out/curves.jsonl" --study "$study"
}

sections=("$@")
[ ${#sections[@]} -gt 0 ] || sections=(where data record study gain more report)
for name in "${sections[@]}"; do section "$name" || failed=1; done > >(tee -a "$out/tuning.log") 2>&1
sleep 0.5 # for tee
say "all done, failed: $failed" | tee -a "$out/tuning.log"
exit "$failed"

#!/bin/sh
# Set the partition mode of this node's AMD GPUs: partition-mode.sh prolog|epilog. Run by slurmd as root; see README.md.
# The job's own values pass only through the environment of the interpreter, which checks each of them.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022
# what the configuration leaves out has its default below, and never the value of a variable of this name from outside
unset python rocm gpus allowed_modes default_mode patience_s limit_s log

configuration=${0%/*}/partition-mode.conf
if [ ! -r "$configuration" ]; then
    echo "partition-mode: $configuration is missing" >&2
    exit 1
fi
# shellcheck source=/dev/null
. "$configuration"
: "${python:?}" "${allowed_modes:?}" "${gpus:?}" "${default_mode?}"
: "${rocm:=/opt/rocm}" "${patience_s:=60}" "${limit_s:=120}" "${log:=/var/log/partition-mode.log}"

# in the foreground: slurmd, if it ends this script, must reach the interpreter by the process group as well
env -i PATH="$PATH" LANG=C.UTF-8 ROCM_PATH="$rocm" \
    SLURMD_NODENAME="${SLURMD_NODENAME:-}" SLURM_JOB_ID="${SLURM_JOB_ID:-}" SLURM_JOB_GPUS="${SLURM_JOB_GPUS:-}" \
    SLURM_JOB_CONSTRAINTS="${SLURM_JOB_CONSTRAINTS:-}" SLURM_JOB_COMMENT="${SLURM_JOB_COMMENT:-}" \
    timeout --foreground --kill-after=5 "$limit_s" \
    "$python" -I -m hpcjobs.mode_hook "$1" --allowed "$allowed_modes" --default "$default_mode" --gpus "$gpus" \
    --patience "$patience_s" --log "$log"
code=$?
if [ "$code" = 124 ] || [ "$code" = 137 ]; then
    # what hangs can write nothing itself; a log that cannot be written must not hide the exit code
    told="$(date '+%F %T') ${SLURMD_NODENAME:-} job ${SLURM_JOB_ID:-} $1: ERROR ended after limit_s=$limit_s s"
    echo "$told" >&2
    { echo "$told" >>"$log"; } 2>/dev/null
fi
exit "$code"

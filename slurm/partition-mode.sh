#!/bin/sh
# Set the partition mode of this node's AMD GPUs: partition-mode.sh prolog|epilog. Run by slurmd as root; see README.md.
# The job's own values pass only through the environment of the interpreter, which checks each of them.
set -u
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
umask 022

configuration=${0%/*}/partition-mode.conf
if [ ! -r "$configuration" ]; then
    echo "partition-mode: $configuration is missing" >&2
    exit 1
fi
# shellcheck source=/dev/null
. "$configuration"
: "${python:?}" "${allowed_modes:?}" "${gpus:?}" "${default_mode?}"

exec env -i PATH="$PATH" LANG=C.UTF-8 ROCM_PATH="${rocm:-/opt/rocm}" \
    SLURMD_NODENAME="${SLURMD_NODENAME:-}" SLURM_JOB_ID="${SLURM_JOB_ID:-}" SLURM_JOB_GPUS="${SLURM_JOB_GPUS:-}" \
    SLURM_JOB_CONSTRAINTS="${SLURM_JOB_CONSTRAINTS:-}" SLURM_JOB_COMMENT="${SLURM_JOB_COMMENT:-}" \
    timeout --kill-after=5 "${limit_s:-120}" \
    "$python" -I -m hpcjobs.mode_hook "$1" --allowed "$allowed_modes" --default "$default_mode" --gpus "$gpus" \
    --patience "${patience_s:-60}" --log "${log:-/var/log/slurm/partition-mode.log}"

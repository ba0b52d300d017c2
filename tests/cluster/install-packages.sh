#!/usr/bin/env bash
# Install what the cluster tests, the kernels' gfx942 compilation, and the tests of modules and of pages in a browser
# need, as root on Debian. Elsewhere say which tests will be left out, why, and how to get them; that is not an error,
# unless HPCJOBS_REQUIRE_CLUSTER=1.
set -euo pipefail

packages=(
  slurm-wlm slurmdbd munge mariadb-server
  g++ clang-19 clang-tools-19 lld-19 libamdhip64-dev rocm-device-libs librocprim-dev
  lmod chromium
)

missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${packages[@]}"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || exit 0
fi

if command -v apt-get >/dev/null && ((EUID == 0)); then
  echo "installing: ${missing[*]}"
  apt-get update --quiet --quiet
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --quiet --no-install-recommends "${missing[@]}" >/dev/null
  exit 0
fi

cat >&2 <<'TEXT'
note: the tests in tests/cluster (a real Slurm on this machine), the compilation of the HIP kernels for gfx942, and the
      tests with lmod and with a browser are left out where their packages are missing; installing those needs root on
      Debian 12. To run them there:
          sudo tests/cluster/install-packages.sh && sudo make test
TEXT
[[ ${HPCJOBS_REQUIRE_CLUSTER:-0} != 1 ]]

#!/usr/bin/env bash
# Builds the CUDA library on a machine with a GPU, and runs the tests and measurements that need one.
#
#   benchmarks/gpu/check.sh [OUTPUT_DIR]          PYTHON=python3: a Python with JAX for CUDA, pytest and hypothesis
#
# Needs no network and takes less than nine minutes. Each stage has its own limit, and a failed stage stops only those
# that depend on it. The exit status is 0 if all passed.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
output=${1:-benchmarks/results/gpu}
mkdir -p "$output" || exit 1
output=$(cd "$output" && pwd)
export JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1 PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/support"
# All stages together take less than nine minutes.
deadline=$((SECONDS + 525))
# With fewer seconds left, training steps are not started.
least=40
stages=""

fail() {
  echo "check.sh: $1" >&2
  exit 1
}

# stage NAME LIMIT_S COMMAND...: runs the command, shows its output and stores it in NAME.log.
stage() {
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  local left=$((deadline - SECONDS))
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  echo "== $name (at most $limit s)"
  if [ "$limit" -gt 0 ]; then
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$output/$name.log"
    status=${PIPESTATUS[0]}
  else
    status=124
  fi
  stages+="$name"$'\t'"$status"$'\t'"$((SECONDS - start))"$'\n'
  return "$status"
}

# steps SIZE LIMIT_S EACH_S: times training steps, or records that no time is left.
steps() {
  local limit=$2 left=$((deadline - SECONDS))
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt "$least" ]; then
    stages+="steps_$1"$'\tleft out\t0\n'
    return
  fi
  # Its own limit is earlier than the stage's, so that it ends by itself with all results.
  stage "steps_$1" "$limit" "$python" benchmarks/gpu/steps.py "$output" --size "$1" \
    --limit $((limit - 8)) --each "$3" --least 25
}

command -v "$python" >/dev/null || fail "there is no $python; name a Python with JAX for CUDA by PYTHON=..."
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 ||
  fail "there is no NVIDIA GPU here (nvidia-smi finds none); the tests that need none run with \`make test\`"
timeout 60 "$python" -c 'import jax; jax.devices("cuda")' 2>"$output/jax.log" ||
  fail "$python has no JAX that sees the GPU: $(tail -n 1 "$output/jax.log")"
for name in build tests link_rates overlap criteria host_library recorded steps_medium steps_xl summary; do
  rm -f "$output/$name.json" "$output/$name.log"
done

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
library=$build/libjaxferry_cuda.so
if stage build 120 "$python" benchmarks/gpu/build.py "$build"; then
  export JAXFERRY_CHECK_LIBRARY=$library
  stage tests 240 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_operations.py
  stage link_rates 120 "$python" benchmarks/gpu/link_rates.py "$library" "$output/link_rates.json"
  stage overlap 45 "$python" benchmarks/gpu/overlap.py "$library" "$output/overlap.json"
  stage criteria 90 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_link_rates.py
  # Whole training steps need both libraries in one folder, because the CPU library runs the host's updates.
  export JAXFERRY_NATIVE_DIR=$build
  stage host_library 60 "$python" -m jaxferry build-native --platform cpu ||
    cp jaxferry/native/libjaxferry_cpu.so "$build" 2>/dev/null
  stage recorded 60 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_recorded.py
  steps medium 270 75
  steps xl 525 120
fi
printf '%s' "$stages" | "$python" benchmarks/gpu/summary.py "$output"

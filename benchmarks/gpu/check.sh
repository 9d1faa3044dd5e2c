#!/usr/bin/env bash
# Eight minutes on a machine with a GPU: see check.py.
#
#   benchmarks/gpu/check.sh OUT [OPTIONS]         PYTHON=python3: a Python with JAX for CUDA, pytest and hypothesis
set -uo pipefail
python=${PYTHON:-python3}

fail() {
  echo "check.sh: $1" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "there is no $python; name a Python with JAX for CUDA by PYTHON=..."
case " $* " in
  *" --device cpu "* | *" --help "* | *" -h "*) ;;
  *)
    command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 ||
      fail "there is no NVIDIA GPU here (nvidia-smi finds none); the tests that need none run with \`make test\`"
    ;;
esac
exec "$python" "$(dirname "$0")/check.py" "$@"

"""On import, makes the package, the GPT-2 example and the tests of this repository importable by benchmarks."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]

sys.path.append(str(_ROOT))
sys.path[:0] = [str(_ROOT / part) for part in ("tests/support", "tests", "examples/gpt2")]
# `make test` installs the GPU compilers there.
sys.path.append(str(Path(sys.prefix) / "gpu-packages"))

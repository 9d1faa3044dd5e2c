"""Python in a process of its own."""

import os
import subprocess
import sys
from typing import Any


def run_python(*command: Any, timeout_s: float = 500, cwd: Any = None, **environment: str) -> str:
    """Runs `python COMMAND` with the modules that tests import; returns what it prints. It must end well.

    Args:
      *command: arguments of Python: a file, or `-c` and code, and their arguments.
      timeout_s: how long it may take.
      cwd: its working directory.
      **environment: further variables.
    """
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    given: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout_s, "cwd": cwd, "env": own}
    done = subprocess.run([sys.executable, *map(str, command)], check=False, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout

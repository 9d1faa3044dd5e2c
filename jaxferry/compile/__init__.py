"""Prepares training steps: from a loss function and a batch to programs that run."""

from jaxferry.compile.compiler import Compiler
from jaxferry.compile.prepared import Prepared
from jaxferry.compile.shared import Shared

__all__ = ["Compiler", "Prepared", "Shared"]

"""`python -m jaxferry.cli`."""

from jaxferry.cli import main

main()

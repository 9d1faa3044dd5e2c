"""`python -m jaxferry`."""

from jaxferry.cli import main

main()

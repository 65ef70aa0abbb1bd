"""The ``cyberslm`` command."""

from cyberslm.cli.main import run

__all__ = ["run"]

"""The ``cyberslm`` command."""

from cyberslm.cli.main import app, run

__all__ = ["app", "run"]

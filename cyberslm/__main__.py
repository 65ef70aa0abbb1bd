"""``python -m cyberslm`` and the ``cyberslm`` command."""

from __future__ import annotations


def main() -> None:
    from cyberslm.cli import run

    run()


if __name__ == "__main__":
    main()

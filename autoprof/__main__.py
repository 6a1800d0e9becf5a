"""Command line, as `python -m autoprof`."""

from autoprof.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m autoprof`: the command line."""

from autoprof.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

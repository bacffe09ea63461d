"""`python -m kgen` is the `kgen` command."""

from kgen.cli import main

if __name__ == "__main__":
    main()

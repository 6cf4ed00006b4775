"""`python -m misconv` is the command `misconv`."""

from misconv.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

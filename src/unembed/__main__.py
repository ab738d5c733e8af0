"""`python -m unembed` is the command `unembed`."""

from __future__ import annotations

from unembed.cli import main

if __name__ == "__main__":
    main()

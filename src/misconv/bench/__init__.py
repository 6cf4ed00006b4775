"""How fast it is, after a look whether it is right: `misconv bench`."""

__all__ = []

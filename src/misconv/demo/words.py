"""Numbers as the report writes them."""

from __future__ import annotations

from markupsafe import Markup, escape

__all__ = ["hold_hyphen", "hold_percent", "percent", "signed"]


def percent(share: float, digits: int = 1) -> str:
    """A share as per cent."""
    return f"{100 * share:.{digits}f} %"


def signed(share: float) -> str:
    """A bias as per cent with its sign, which is a minus and not a hyphen."""
    number = f"{100 * share:+.0f}"
    return ("0" if number in ("+0", "-0") else number.replace("-", "−")) + " %"


def hold_percent(text: str) -> Markup:
    """A number and its % stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")


def hold_hyphen(text: str) -> Markup:
    """So does the name k-NN."""
    return escape(text).replace("k-NN", "k\N{NON-BREAKING HYPHEN}NN")

"""How good a density is: reading incomplete images, scores of hidden pixels, and their picture."""

from misconv._assess.images import batches, hide_more
from misconv._assess.picture import draw
from misconv._assess.scores import LEVELS, Reliability, Scores

__all__ = ["LEVELS", "Reliability", "Scores", "batches", "draw", "hide_more"]

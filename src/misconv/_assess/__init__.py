"""How good a density is: reading incomplete images, scores of hidden pixels, and their picture."""

from misconv._assess.images import batches, hide_more
from misconv._assess.picture import draw
from misconv._assess.scores import LEVELS, Reliability, Scores, coverage_level

__all__ = ["LEVELS", "Reliability", "Scores", "batches", "coverage_level", "draw", "hide_more"]

"""Follow an image through a network and find its stem."""

from misconv._convert.follow import SyncBatchNorm, mark
from misconv._convert.proof import acceptable_image, prove, same_randomness
from misconv._convert.search import Search, as_tree, find
from misconv._convert.stem import Response, Stem
from misconv._convert.tracker import Tracker
from misconv._convert.usual import answer

__all__ = [
    "Response",
    "Search",
    "Stem",
    "SyncBatchNorm",
    "Tracker",
    "acceptable_image",
    "answer",
    "as_tree",
    "find",
    "mark",
    "prove",
    "same_randomness",
]

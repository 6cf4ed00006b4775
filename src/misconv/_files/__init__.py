"""Images in files: read as they are stored, with what is missing in them, and written back in the same way."""

from misconv._files.bands import is_raster, names_of, read_file, shape_of, write_file
from misconv._files.dataset import Crops, ImageFiles
from misconv._files.find import SUFFIXES, FoundFile, find_files
from misconv._files.image import StoredImage, holds, read_image, read_shape, write_deviation, write_image
from misconv._files.labels import labels_of, read_labels
from misconv._files.scene import Scene, Window, open_scene, write_scene, write_window
from misconv._files.tiles import Prediction, fill_scene, predict, predict_batch, reach_of

__all__ = [
    "SUFFIXES",
    "Crops",
    "FoundFile",
    "ImageFiles",
    "Prediction",
    "Scene",
    "StoredImage",
    "Window",
    "fill_scene",
    "find_files",
    "holds",
    "is_raster",
    "labels_of",
    "names_of",
    "open_scene",
    "predict",
    "predict_batch",
    "reach_of",
    "read_file",
    "read_image",
    "read_labels",
    "read_shape",
    "shape_of",
    "write_deviation",
    "write_file",
    "write_image",
    "write_scene",
    "write_window",
]

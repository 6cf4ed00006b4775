"""The page of `misconv app`: hide a part of an image, and see what the library makes of the rest.

::

    pip install 'misconv[app]'
    misconv app                         # then open http://127.0.0.1:7860/ in a browser; Ctrl-C ends it
    misconv app --port 8000 --upload-limit 50

Choose a digit, a part of a photograph or an image of your own (PNG, JPEG, WebP, TIFF, GeoTIFF, .npy), and paint a hole
with the mouse, a finger or the keyboard. The page shows fills, the standard deviation, samples, the responses of a
first layer, and for digits how class probabilities change as the hole grows. The first start fits small densities for
about a minute and keeps them in ``$XDG_CACHE_HOME/misconv/app`` (``~/.cache/misconv/app``); later starts take seconds.
The page needs no internet, listens on 127.0.0.1 unless ``--host`` says otherwise, and removes its temporary files.

`pictures`, `holes`, `analysis` and `downloads` compute, `report` and `drawing` make HTML of it, `looks` is what one
visitor sees, `page` and `server` are Gradio and uvicorn.
"""

from misconv.app.models import cache_folder, prepare_models
from misconv.app.server import check_installed, listen, serve

__all__ = ["cache_folder", "check_installed", "listen", "prepare_models", "serve"]

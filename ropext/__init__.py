"""ropext extends the context window of pretrained Hugging Face models, and proves that it works."""

from ropext.version import __version__

__all__ = ["__version__"]

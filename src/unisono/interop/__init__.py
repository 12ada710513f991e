"""Export to and import from the folder layout of Hugging Face transformers. Importing this package alone imports no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

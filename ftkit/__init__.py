"""ftkit: fine-tune 10B-15B models on one node of older GPUs, through the Hugging Face Trainer.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so `ftkit recipes list` does not wait
for torch.
"""

from importlib.metadata import version

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = version("ftkit")

"""Models by name: one small real model, tiny random ones of several families, a folder or a hub id.

`load` finds what was asked for; `smollm2` makes and guards the cache of the real model; `tiny` builds the random ones;
`messages` decides what the user reads meanwhile.
"""

from detlab.models.load import DTYPES, load_model, model_names, tokenizer_for
from detlab.models.tiny import FAMILIES, tiny_tokenizer

__all__ = ["DTYPES", "FAMILIES", "load_model", "model_names", "tiny_tokenizer", "tokenizer_for"]

"""Converts text to token ids and back, off the engine's thread. No torch.

- ``tokenizer``    encodes; knows special tokens and chat template
- ``detokenizer``  ids to text, incremental and UTF-8 safe
- ``text_stream``  detokenizes the text of one job, and finds its stop strings across any split
"""

from worker.text.text_stream import Fed, TextStream
from worker.text.tokenizer import Tokenizer

__all__ = ["Fed", "TextStream", "Tokenizer"]

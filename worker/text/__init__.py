"""Converts text to token ids and back, off the engine's thread. No torch.

- ``tokenizer``    encodes text; has the special tokens and the chat template
- ``detokenizer``  decodes ids to text, incrementally and UTF-8 safe
- ``text_stream``  detokenizes one job's text and finds stop strings across any split
"""

from worker.text.text_stream import Fed, TextStream
from worker.text.tokenizer import Tokenizer

__all__ = ["Fed", "TextStream", "Tokenizer"]

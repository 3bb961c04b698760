"""Converts text to token ids and back, off the engine's thread. No torch.

- ``tokenizer``    encodes; knows special tokens and chat template
- ``detokenizer``  ids to text, incremental and UTF-8 safe
- ``stop_strings`` finds stop strings, holding back what might become one
- ``text_stream``  detokenizes and stops the text of one job
"""

from worker.text.text_stream import Fed, TextStream
from worker.text.tokenizer import Tokenizer

__all__ = ["Fed", "TextStream", "Tokenizer"]

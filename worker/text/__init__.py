"""From text to token ids and back, off the engine's thread. No torch.

- ``tokenizer``    encodes; knows special tokens and chat template
- ``pieces``       what each token id stands for, in bytes
- ``detokenizer``  ids to text, incremental and UTF-8 safe
- ``stops``        finds stop strings, holding back what might become one
- ``stream``       both, per job
"""

from worker.text.stream import Fed, TextStream
from worker.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["Fed", "TextStream", "Tokenizer", "TokenizerError"]

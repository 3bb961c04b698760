"""Converts text to token ids and back, off the engine's thread. No torch."""

from worker.text.text_stream import Fed, TextStream
from worker.text.tokenizer import Tokenizer

__all__ = ["Fed", "TextStream", "Tokenizer"]

"""GGUF files, llama.cpp's format: their metadata and their vocabularies.

- ``file``        metadata by type; the header's reader itself is ``protocol.gguf``
- ``vocabulary``  the vocabulary as a ``tokenizer.json``
- ``__main__``    writes that for an orchestrator, where another server runs the model
"""

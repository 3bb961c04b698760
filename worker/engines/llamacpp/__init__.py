"""llama.cpp behind Tidegate's lanes: quantised models (GGUF) with a deadline at every step.

- ``gguf_file``   a file's metadata, its split parts, its digest
- ``vocabulary``  the GGUF's vocabulary as a ``tokenizer.json``
- ``options``     ``TIDEGATE_WORKER__ENGINE_ARGS``, checked
- ``library``     the C functions, of one build of llama.cpp
- ``model``       a loaded model with its KV cells: batches in, logits out
- ``sequences``   which job has which of llama.cpp's sequences; what idle ones still hold
- ``abort``       stops a step whose jobs have all been given up
- ``backend``     the ``Backend``: continuous batching and our own sampling
- ``build``       settings to a loaded engine
"""

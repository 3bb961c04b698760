"""Supervised units, each a ``supervise.ProcessUnit``.

- ``triton``          one Triton: start, ready, lost, stop
- ``triton_control``  queries one over gRPC: is it up, is its model ready, will it drain
- ``llamacpp``        one llama.cpp server, instead of a Triton for a GGUF file
- ``orchestrator``    the orchestrator as a child process
- ``store``           the Redis or Valkey that several orchestrators share
"""

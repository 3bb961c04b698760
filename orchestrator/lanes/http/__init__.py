"""Lanes to servers over HTTP: vLLM's, llama.cpp's, text-generation-inference.

- ``http_lane`` what they have in common; ``vllm``, ``llamacpp``, ``tgi``: each server's API
- ``pool``      the one client, its connections kept and bounded
- ``sse``       server-sent events out of bytes, without a copy
"""

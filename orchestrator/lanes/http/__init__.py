"""Lanes to servers over HTTP: vLLM, llama.cpp, text-generation-inference.

- ``http_lane`` what they have in common; ``vllm``, ``llamacpp``, ``tgi``: each server's API
- ``pool``      the one client, its connections kept and bounded
- ``sse``       reads server-sent events from bytes, without a copy
"""

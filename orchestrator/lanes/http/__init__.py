"""Lanes to servers over HTTP: vLLM, llama.cpp, text-generation-inference.

- ``http_lane`` what they have in common, and the one client
- ``vllm``, ``llamacpp``, ``tgi`` each server's API
- ``sse`` reads server-sent events from bytes, without a copy
"""

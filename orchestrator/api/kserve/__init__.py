"""``/v2/models``, ``/v2/health``, ``/v2``: KServe's v2 protocol with Triton's generate extension.

Serves clients of a plain Triton: the contract is that of its vLLM backend, tensor by tensor.
"""

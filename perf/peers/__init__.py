"""Tidegate beside its peers, in one run: vLLM on the CPU, vllm-router over a mock backend, and by
rule llama.cpp's server and LiteLLM.

In the order of the data: ``installs`` puts a peer into an environment of its own, ``servers``
starts it beside ours, ``stories`` are the requests, ``goodput``, ``speed`` and ``relay`` measure,
each in turns, ``conformance`` tests what a deadline means there, one after the other, and
``__main__`` writes table and bundle.
"""

"""Lanes to servers that are not Tidegate's: vLLM, llama.cpp, text-generation-inference, Triton's
LLM backends.

- ``polled``      what all of them share: jobs with deadlines, health by asking
- ``job``         one job and how it can fail; ``meter`` measures a server's pace from outside
- ``cards``       model cards of the tokenizer's folder and what the server tells
- ``text``        for servers that take or give text alone: prompts, stop strings, counts
- ``completions`` the lane over HTTP with event streams; ``kinds`` the API of each such server
- ``plain``       Triton's LLM backends over gRPC, by the ``contract`` that a model's metadata shows
"""

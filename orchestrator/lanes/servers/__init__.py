"""Lanes to servers other than Tidegate's: vLLM, llama.cpp, text-generation-inference, and any with
OpenAI's API.

- ``lane``  jobs with deadlines, health by polling; ``kinds`` adds the API of each such server
- ``connection`` HTTP with one server
- ``job``   one job and its failures; ``meter`` measures a server's speed from outside
- ``cards`` model cards from the tokenizer's folder and the server
- ``text``  for servers that take or give text alone: prompts, stop strings, counts
"""

"""Lanes to servers other than Tidegate's: vLLM, llama.cpp, text-generation-inference, and any with
OpenAI's API.

- ``polled`` shared by all of them: jobs with deadlines, health by polling
- ``job``         one job and its failures; ``meter`` measures a server's speed from outside
- ``cards`` model cards from the tokenizer's folder and the server
- ``text``        for servers that take or give text alone: prompts, stop strings, counts
- ``completions`` the lane over HTTP with event streams; ``kinds`` the API of each such server
"""

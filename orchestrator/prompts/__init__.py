"""Converts text and chats to token ids without delaying urgent requests.

- ``encoder``        one model's tokenizer and chat template
- ``chat_template``  the Jinja sandbox
- ``stage``          encodes long prompts on threads, ordered by deadline
- ``cuts``           cuts texts into slices, and inside text that looks like a special token
"""

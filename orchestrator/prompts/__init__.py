"""Turns text and chats into token ids, without ever delaying urgent requests.

- ``encoder``        one model's tokenizer and chat template
- ``chat_template``  the Jinja sandbox
- ``stage``          long prompts, on threads, by deadline
- ``cuts``           where a text is cut: into slices, and inside what looks like a special token
"""

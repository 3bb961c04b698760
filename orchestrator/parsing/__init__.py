"""Parses a model's output while it streams: reasoning, content, tool calls.

- ``parser``     converts the text of one output to pieces; ``collect`` joins the pieces
- ``pieces``     the pieces
- ``formats``    a model's output format, derived from its chat template
- ``calls``      tool calls in the formats of model families
- ``json_call``  an incomplete call as a JSON object, or between markers
- ``tagged_call``  an incomplete call with each argument in tags
- ``harmony``    the format of gpt-oss: calls and reasoning in messages with headers
- ``reasoning``  the thinking in tags before the answer
- ``call_grammar``, ``rules``  grammars of forced calls, and of answers after the thinking

Text that may begin a marker is held back. A malformed call becomes content.
"""

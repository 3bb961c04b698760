"""``tidegate mcp``: a proxy in front of one MCP server that ends calls when their time is over.

- ``run``           stdin and stdout, signals
- ``relay``         messages both ways, calls and their time limits, a server that died
- ``limits``        how long a call may take
- ``answers``       messages that the proxy writes itself
- ``introduction``  what a new server has to be told
- ``headers``       HTTP headers of messages
- ``servers``       a server as a command or a URL

Built on the official package ``mcp`` (the extra ``mcp``): its transports carry the
messages, as JSON-RPC, and nothing here knows tools, resources or prompts one by one.
"""

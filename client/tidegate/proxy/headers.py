"""HTTP headers that servers behind streamable HTTP want beside some messages."""

from typing import Any

from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp.shared.message import ClientMessageMetadata
from mcp_types import (
    PROTOCOL_VERSION_META_KEY,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from tidegate.proxy.answers import params_of
from tidegate.proxy.introduction import INITIALIZE
from tidegate.proxy.limits import CALL


class HttpHeaders:
    """Headers by what has passed: the protocol's version by the handshake, those that mirror a
    tool's arguments by ``tools/list``. Other transports ignore them."""

    def __init__(self) -> None:
        self._version: str | None = None
        self._mirrored: dict[str, dict[tuple[str, ...], str]] = {}
        """Headers' names by argument, by tool."""

    def of(self, message: JSONRPCMessage) -> ClientMessageMetadata | None:
        """Headers of a message to the server, as its transport takes them."""
        if not isinstance(message, JSONRPCRequest | JSONRPCNotification):
            return None
        params = params_of(message)
        meta = params.get("_meta")
        stated = meta.get(PROTOCOL_VERSION_META_KEY) if isinstance(meta, dict) else None
        if isinstance(stated, str):
            return ClientMessageMetadata(headers=self._modern(message.method, params, stated))
        if self._version is None or message.method == INITIALIZE:
            return None
        return ClientMessageMetadata(headers={MCP_PROTOCOL_VERSION_HEADER: self._version})

    def _modern(self, method: str, params: dict[str, Any], version: str) -> dict[str, str]:
        """Headers since protocol 2026-07-28, which mirror what stands in the body."""
        headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: method}
        name = params.get(NAME_BEARING_METHODS.get(method, ""))
        if not isinstance(name, str):
            return headers
        headers[MCP_NAME_HEADER] = encode_header_value(name)
        if method == CALL and name in self._mirrored:
            headers |= mcp_param_headers(self._mirrored[name], params.get("arguments") or {})
        return headers

    def learn(self, request: JSONRPCRequest, answer: JSONRPCResponse) -> None:
        """Take in what the server's answer says about headers to come."""
        if request.method == INITIALIZE:
            version = answer.result.get("protocolVersion")
            self._version = version if isinstance(version, str) else None
        elif request.method == "tools/list":
            tools = answer.result.get("tools")
            for tool in tools if isinstance(tools, list) else ():
                match tool:
                    case {"name": str() as name, "inputSchema": schema} if (
                        find_invalid_x_mcp_header(schema) is None
                    ):
                        self._mirrored[name] = x_mcp_header_map(schema)

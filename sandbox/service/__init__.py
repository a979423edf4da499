"""The service beside an agent host: one application layer, and its edges HTTP and MCP."""

"""A trained agent as a tool: it searches for a question, and hands the evidence that it wrote to another model.

`python -m tasks.tool` serves it over HTTP with the protocol of the search server, `python -m tasks.tool.mcp_server` as
a tool of the Model Context Protocol, and `python -m tasks.tool.measure` measures whether it helps another model. No
stage of the pipeline imports this room.
"""

"""A trained agent as a tool: it searches for a question, and hands the evidence that it wrote to another model.

`python -m tasks.tool` serves it over HTTP with the protocol of the search server, and `python -m tasks.tool.mcp_server`
as a tool of the Model Context Protocol. Whether it helps another model is measured by the stage `tool` in a run, and by
`python -m tasks.tool.measure` for any two model folders.
"""

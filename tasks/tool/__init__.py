"""A trained agent for others: people who ask it, chat clients, and models that read the evidence which it wrote.

`python -m tasks.tool.ask` answers in a terminal, `python -m tasks.tool.chat_server` by OpenAI's chat protocol.
`python -m tasks.tool` serves evidence over HTTP with the protocol of the search server, and
`python -m tasks.tool.mcp_server` as a tool of the Model Context Protocol. Whether it helps another model is measured by
the stage `tool` in a run, and by `python -m tasks.tool.measure` for any two model folders.
"""

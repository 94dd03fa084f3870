"""Tools that an episode calls: loaded and run in worker processes that can be killed, never in the trainer.

toolbox.py     the trainer's side: schemas, begin / call / end of an episode, each a future
tool_call.py   what travels between the two
service.py     the worker's side; kinds.py: the three kinds of tools; loading.py: where they come from
schema.py, text.py   pure functions: schemas and arguments, what becomes of a tool's value
calculator.py, code_interpreter.py, search.py, http_service.py   tools that come with the package
mcp_tools.py, mcp_client.py   tools of MCP servers
"""

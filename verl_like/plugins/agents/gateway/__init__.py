"""A base URL that trains: any program's calls to a model become an episode.

runner.py     an EpisodeRunner: starts the program, gives it a URL and a key, makes turns of what it asked
server.py     HTTP, in the event loop of the episodes; protocols.py: OpenAI's and Anthropic's forms
session.py    one episode: which tokens a conversation stands for, and its completions as a tree
program.py    the worker's side: users' coroutines, functions and command lines
"""

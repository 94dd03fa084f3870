"""Server for clients of the Tinker protocol: one base model, an adapter for each experiment (docs/tinker_server.md).

start.py    keys, checks, the process           service.py    what requests do: sessions, models, futures, samplers
server.py   HTTP, API keys, errors              catalogue.py  lists of what a tenant has
bodies.py   JSON bodies; prompts.py, of samples store.py      what survives a kill
wire.py     protobuf bodies                     fair.py       whose turn it is
engine.py   the two engines                     adapters.py, losses.py
"""

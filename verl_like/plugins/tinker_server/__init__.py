"""Server for clients of the Tinker protocol: one base model, an adapter for each experiment (docs/tinker_server.md).

start.py    keys, checks, the process           service.py   what requests do: sessions, models, futures, samplers
server.py   HTTP, API keys, errors              store.py     what survives a kill
bodies.py   JSON bodies                         fair.py      whose turn it is
wire.py     protobuf bodies                     engine.py    the engines; adapters.py, losses.py
"""

"""Untrusted programs in a locked-down child process: see docs/security.md for what it defends against.

`client.Jail` is the face of it, used from a reward worker. What runs inside (`jail`, `supervisor`, `child`) uses the
standard library alone. The verdict is always given outside, on plain data: the program never shares a process with it.
"""

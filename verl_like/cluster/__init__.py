"""Processes: how a driver starts ranks, calls them, learns of their failures and leaves nothing behind.

`worker_group` is what the trainer sees, `local` runs one rank in this process, `ray_group` one Ray actor per rank. Only
`launch`, `resources`, `ray_group` and `nodes` import Ray, so the local launcher works where Ray is not installed.
"""

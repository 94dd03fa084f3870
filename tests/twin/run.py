"""Run cases on the twin: `python -m tests.twin.run FILE` with a JSON list of cases; an outcome a line.

Each case has a process of its own, forked from this one, which has everything imported.
"""

from __future__ import annotations

from tests.twin import native

if __name__ == "__main__":
    native.load()
    from tests.twin import command

    command.main()

"""Studies made once, whose figures stand in docs/. Run from the repository's root: `python -m benchmarks.NAME`."""

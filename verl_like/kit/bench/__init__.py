"""Benchmarks: the real trainer on fixed shapes, against floors and peers. They print, and assert nothing."""

"""Output of a run for people: metrics under verl's names, trackers, live progress, sample dumps, logging.

Nothing in here changes a run. Import the modules directly; this file stays empty so that a worker which only needs
`observe.logs` does not pay for the trackers.
"""

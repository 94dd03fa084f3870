"""Command of the twin, for a process that has the native library: cases from a file, an outcome a line."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_like.kit.twin import stand_in, step, world
from verl_like.kit.twin.mode import Twin


def main() -> None:
    """Run the cases of the file that the command line names, one after the other."""
    for given in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child == 0:
            print(json.dumps(_outcome(step.Case(**given))), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def _outcome(case: step.Case) -> dict[str, Any]:
    os.environ["TWIN_GPUS"] = str(min(8, case.world))
    stand_in.install(min(8, case.world))
    try:
        with tempfile.TemporaryDirectory() as folder:
            if os.environ.get("TWIN_PROF"):
                import cProfile, pstats
                pr = cProfile.Profile(); pr.enable()
            found = step.run(case, Path(folder), world.alone(case.world, case.rank), Twin())
            if os.environ.get("TWIN_PROF"):
                pr.disable(); pstats.Stats(pr, stream=sys.stderr).sort_stats("cumtime").print_stats(70); pstats.Stats(pr, stream=sys.stderr).sort_stats("tottime").print_stats(30)
        return {"name": case.name, "seconds": time.process_time()} | dataclasses.asdict(found)
    except Exception as error:
        print(traceback.format_exc()[-6000:], file=sys.stderr, flush=True)
        return {"name": case.name, "error": f"{type(error).__name__}: {error}"[:2000]}

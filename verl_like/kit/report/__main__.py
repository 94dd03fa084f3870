"""`python -m verl_like.kit.report RUN`: what a run starts to write its report, beside itself and out of its way."""

import os
import sys

from verl_like.kit.report.page import write_report

os.nice(10)
write_report(sys.argv[1])

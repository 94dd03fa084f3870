"""Report of the check's findings, as lines."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 1e-4  # of the gradient's size; float32 rounding of other matrix shapes stays well below


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way of computing something, and how far it is from its yardstick."""

    name: str
    difference: float
    limit: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit


def table(findings: list[Finding]) -> str:
    """One line a finding, the largest difference at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{f.name:<{width}}  {f.difference:9.1e}  {'ok' if f.passed else 'DIFFERENT'}" for f in findings]
    nearest = max(findings, key=lambda finding: finding.difference / finding.limit)
    verdict = "passed" if all(finding.passed for finding in findings) else "FAILED"
    at = f"largest relative difference {nearest.difference:.1e} (limit {nearest.limit:.0e})"
    return "\n".join([*lines, f"{at}: {verdict}"])

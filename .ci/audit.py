"""What is installed against the known vulnerabilities: `make audit`. Exit code 1 where there is one; what was not asked is said.

pip-audit in an environment of its own asks PyPI. It calls a package that PyPI's data do not hold "skipped" and is content, so where they
cannot be reached, or an index of another kind stands there, all is skipped: that is no audit, and one package is asked about first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

TOOL = Path(sys.prefix) / "audit"
PROBE = "requests==2.31.0"
"""A release with published vulnerabilities: whoever knows none of it knows nothing."""

Dependency = dict[str, Any]


class NotAuditedError(Exception):
    """Why nothing is known."""


class Result(NamedTuple):
    """What pip-audit said."""

    clean: int
    vulnerable: tuple[str, ...]
    """Such as 'requests 2.31.0: PYSEC-2024-1 (mended in 2.32.0)'."""
    skipped: tuple[str, ...]
    """Packages that it knows nothing of."""

    def told(self) -> str:
        """Return the lines to print."""
        asked = self.clean + len(self.vulnerable)
        found = f"{len(self.vulnerable)} with known vulnerabilities" if self.vulnerable else "no known vulnerability"
        unknown = f"; not audited, for the index does not know them: {', '.join(self.skipped)}" if self.skipped else ""
        return "\n".join((f"audited: {asked} packages, {found}{unknown}", *(f"  {line}" for line in self.vulnerable)))


def installed() -> list[str]:
    """Return what is installed beside this Python, pinned; without local versions (torch 2.13.0+cpu), which no index knows."""
    found = {(one.metadata["Name"], one.version.partition("+")[0]) for one in distributions()}
    return sorted(f"{name}=={version}" for name, version in found if name.lower() != "gpudiag")


def read(text: str) -> Result:
    """Return what the JSON of pip-audit says. Raises NotAuditedError."""
    try:
        listed: list[Dependency] = json.loads(text)["dependencies"]
        vulnerable = [one for one in listed if one.get("vulns")]
        skipped = [one["name"] for one in listed if "skip_reason" in one]
        return Result(len(listed) - len(vulnerable) - len(skipped), tuple(map(_line, vulnerable)), tuple(skipped))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotAuditedError("pip-audit gave no result") from None


def _line(one: Dependency) -> str:
    known = [f"{found['id']} (mended in {', '.join(found.get('fix_versions') or ['no release'])})" for found in one["vulns"]]
    return f"{one['name']} {one['version']}: {'; '.join(known)}"


def asked(pins: Sequence[str], until: float) -> Result:
    """Return what pip-audit says of exact versions. Raises NotAuditedError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "installed.txt")
        path.write_text("\n".join(pins), encoding="utf-8")
        options = ["--requirement", str(path), "--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        done = _run([str(_program("pip-audit")), *options], until)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise NotAuditedError((done.stderr.strip().splitlines() or ["pip-audit failed"])[-1][-300:])
    return read(done.stdout)


def audit(until: float) -> Result:
    """Return the audit of what is installed. Raises NotAuditedError."""
    if not _program("pip-audit").exists():
        venv.create(TOOL, with_pip=True, clear=True)
        if _run([str(_program("python")), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "pip-audit"], until).returncode:
            raise NotAuditedError("pip-audit could not be installed")
    if not asked([PROBE], until).vulnerable:
        raise NotAuditedError(f"the index that was asked knows no vulnerabilities (not even those of {PROBE})")
    return asked(installed(), until)


def _program(name: str) -> Path:
    return TOOL / ("Scripts" if sys.platform == "win32" else "bin") / name


def _run(command: Sequence[str], until: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise NotAuditedError("it took too long") from None
    except OSError as error:
        raise NotAuditedError(f"{command[0]}: {error.strerror}") from None


def main() -> int:
    """Print the outcome; return 1 where something installed is known to be vulnerable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, installing pip-audit included")
    until = time.monotonic() + parser.parse_args().limit
    try:
        result = audit(until)
    except NotAuditedError as error:
        print(f"not audited: {error}")
        return 0
    print(result.told())
    return 1 if result.vulnerable else 0


if __name__ == "__main__":
    sys.exit(main())

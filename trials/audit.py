"""Known advisories of everything that the locks in `requirements/` pin, by pip-audit.

    make audit

pip-audit says "No known vulnerabilities found" also when it could look up nothing. Here a package
that could not be looked up counts as such, and the exit code tells:

    0   all were looked up, and none has an advisory
    1   some have
    2   some could not be looked up, so nothing can be said about them
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCKS = sorted((Path(__file__).parent.parent / "requirements").glob("*.txt"))


def advisories(lock: Path) -> list[dict[str, Any]] | None:
    """What pip-audit says of each package; None if it could not do its work at all."""
    command = [sys.executable, "-m", "pip_audit", "-r", str(lock), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        print(f"{lock.name}: pip-audit failed: {last[:200]}")
        return None
    return found


def main() -> int:
    total, unknown, advised, failed = 0, 0, 0, 0
    for lock in LOCKS:
        packages = advisories(lock)
        if packages is None:
            failed += 1
            continue
        for package in packages:
            total += 1
            name = f"{lock.name}: {package['name']} {package.get('version', '')}".strip()
            if "skip_reason" in package:
                unknown += 1
            for advisory in package.get("vulns", ()):
                fixed = ", ".join(advisory["fix_versions"]) or "no release"
                print(f"{name}: {advisory['id']}, fixed in {fixed}")
            advised += bool(package.get("vulns"))
    print(
        f"audit: {total} packages in {len(LOCKS)} locks: {advised} with known advisories, "
        f"{unknown} that could not be looked up, {failed} locks that could not be read"
    )
    if unknown or failed:
        print("The advisory service could not be reached for all of them: this is no clean bill.")
    return 1 if advised else 2 if unknown or failed else 0


if __name__ == "__main__":
    sys.exit(main())

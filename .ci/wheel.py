"""Build the wheel, look inside, install it alone in a new environment, and run what a newcomer would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Exit status 1 with the reason where something is not as it should be."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(scratch), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            tops = {n.split("/")[0] for n in archive.namelist()}
        packages = {t for t in tops if not t.endswith(".dist-info")}
        if packages != {"thalweg"}:
            raise SystemExit(f"the wheel's top level is {sorted(packages)}, not thalweg alone")
        print(f"{wheel.name}: top level is exactly thalweg")
        venv.create(scratch / "venv", with_pip=True)
        python = scratch / "venv" / "bin" / "python"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

        def install(what: str) -> None:
            subprocess.run([python, "-m", "pip", "install", "-q", what], check=True)

        def thalweg(*words: str, shown: bool = True) -> None:
            output = None if shown else subprocess.DEVNULL
            subprocess.run([python.with_name("thalweg"), *words], check=True, cwd=scratch, env=environment, stdout=output)

        def written() -> list[str]:
            return sorted(path.name for path in (scratch / "starter" / "out").rglob("*.parquet"))

        install(str(wheel))  # the starter needs no extra
        thalweg("new", "starter")
        thalweg("check", "starter/pipeline.yaml")
        thalweg("run", "starter/pipeline.yaml")
        first = written()
        if not first:
            raise SystemExit("the starter pipeline wrote nothing")
        thalweg("run", "starter/pipeline.yaml")
        if written() != first:
            raise SystemExit("the starter pipeline wrote again what it had written")
        thalweg("coverage", "starter/pipeline.yaml")
        thalweg("schema", shown=False)
        install(f"{wheel}[all]")
        for example in sorted((ROOT / "examples").rglob("*.*")):
            if example.suffix in (".yaml", ".toml", ".json"):
                thalweg("check", str(example))
        print("installed alone, checked every example, ran the starter")


if __name__ == "__main__":
    main()

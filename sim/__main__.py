"""`python -m sim`: simulate a pipeline, or a row of the catalogue, in a world where time is ours.

    run PIPELINE         draw faults by seeds: --seeds N or --seconds S, --seed K for one, --jobs J, --json OUT
    crashpoints PIPELINE every effect of a clean run in four positions; --pairs for every two of them
    meta PIPELINE        each seed in two processes with two hash seeds: the same events, or the first that differs
    sabotage standard    plant each bug of catalogue.sabotage and see it found
    replay FILE          one plan again, and its story

PIPELINE is any file that `thalweg check` accepts and whose technologies have twins, or `standard`. Records come from
--sample FILE, else from sample.ndjson beside the pipeline, else they are drawn from the codec's schema.
Exit status: 0 all held, 1 something did not, 2 the command line is wrong, 78 the pipeline is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fakes.faults import POSITIONS
from sim import campaign, explore, fence
from sim.air import line
from sim.campaign import Campaign, Order, loaded, planted, prepared
from sim.explore import Range
from sim.plan import Plan
from sim.world import Result

CORPUS: Final = Path(__file__).parent / "corpus"

REAL_S: Final = "simulated seconds a second"

console = Console(highlight=False, soft_wrap=True)


def base_plan(options: argparse.Namespace) -> Plan:
    """The plan without faults that the command line asks for."""
    return Plan(
        options.subject,
        nodes=options.nodes,
        records=options.records,
        partitions=options.partitions,
        sabotage=options.sabotage,
        notes={"sample": str(options.sample)} if options.sample else {},
    )


# --- run --------------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Draw and run seeds."""
    begun = time.perf_counter()
    order = Order(
        base_plan(options), options.sample, options.first, options.seeds, options.seconds, keep_going=options.keep_going
    )
    if options.seed is not None:
        order = replace(order, first=options.seed, seeds=1)
    with _progress() as progress:
        task = progress.add_task(options.subject, total=order.seeds or None)
        if options.jobs > 1:
            found = campaign.run_in_processes(order, options.jobs, lambda part: progress.advance(task, part.runs))
        else:
            found = campaign.run(order, lambda _: progress.advance(task))
    took_s = time.perf_counter() - begun
    _tables(found, options, took_s)
    status = _verdict(found, options)
    if options.json:
        options.json.write_text(json.dumps(figures(found, took_s), indent=2))
    return status


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def figures(found: Campaign, took_s: float) -> dict[str, Any]:
    """A found for machines."""
    return {
        "runs": found.runs,
        "failures": [{**explore.encoded(r), "story": explore.story(r)} for r in found.failures],
        "seconds": round(took_s, 2),
        "seeds_per_second": round(found.runs / took_s, 1),
        "simulated_to_real": round(found.virtual_s / took_s, 1),
        "records_per_second": round(found.records / took_s),
        "batches_per_seed": round(found.batches / max(1, found.runs), 1),
        "effects_per_seed": round(found.effects / max(1, found.runs), 1),
        "steps_per_seed": round(found.steps / max(1, found.runs)),
        "restarts": found.restarts,
        "compared_without_memo": found.compared,
        "armed": dict(sorted(found.armed.items())),
        "fired": dict(sorted(found.fired.items())),
        "felt": dict(sorted(found.felt.items())),
        "never_felt": found.unfelt,
        "escapes": found.escapes[:20],
    }


def _tables(found: Campaign, options: argparse.Namespace, took_s: float) -> None:
    table = Table("fault", "armed", "fired", "felt", title=f"{options.subject}: {found.runs} seeds")
    for kind in sorted(found.armed):
        table.add_row(kind, *(str(c[kind]) for c in (found.armed, found.fired, found.felt)))
    if found.armed:
        console.print(table)
    n = max(1, found.runs)
    console.print(
        f"{found.runs / took_s:.1f} seeds/s   {found.virtual_s / took_s:.0f} {REAL_S}   "
        f"{found.records / took_s:,.0f} records/s   per seed: {found.batches / n:.0f} batches, "
        f"{found.effects / n:.0f} effects, {found.steps / n:.0f} steps   {found.restarts} restarts   "
        f"{found.compared} compared without memo"
    )


def _verdict(found: Campaign, options: argparse.Namespace) -> int:
    for escape in found.escapes[:5]:
        console.print(f"ESCAPE {escape}")
    for result in found.differing[:5]:
        console.print(f"DIFFERS seed {result.plan.seed}: another trace without the memo")
    if found.failures:
        _told_failure(found.failures[0], options)
        console.print(f"[bold]FAILS[/bold]: {len(found.failures)} of {found.runs} seeds")
        return 1
    if found.unfelt and found.runs >= 200:
        console.print(f"[bold]FAILS[/bold]: armed and never felt: {', '.join(found.unfelt)}")
        return 1
    if not found.ok:
        return 1
    console.print(f"holds: every invariant in {found.runs} seeds")
    return 0


def _told_failure(result: Result, options: argparse.Namespace) -> None:
    """Shrink it, keep it, and say how to see it again."""
    subject = loaded(options.subject, options.sample)
    plan = replace(result.plan, invariant=result.violations[0].invariant, commit=_commit())
    runs = 0
    if not options.no_shrink:
        plan, result, runs = explore.shrunk(subject, plan, lambda: planted(options.sabotage))
    folder = Path(options.corpus)
    folder.mkdir(parents=True, exist_ok=True)
    where = folder / f"{subject.name}-{plan.invariant}-{plan.seed}.json"
    where.write_text(plan.encoded())
    console.print(f"{result.violations[0]}")
    console.print(f"shrunk in {runs} runs to {len(plan.faults)} faults: {'; '.join(f.words() for f in plan.faults) or 'none'}")
    for told in explore.story(result):
        console.print(told, markup=False)
    console.print(f"replay: python -m sim replay {where}")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


# --- crash points -----------------------------------------------------------------------------------------------------


def crashpoints(options: argparse.Namespace) -> int:
    """Every effect in every position, and how many that are."""
    subject = loaded(options.subject, options.sample)
    prepared()
    base = base_plan(options)
    begun = time.perf_counter()
    table: dict[str, dict[str, int]] = {}
    failures: list[Result] = []
    unfired = explored = effects = 0
    with planted(options.sabotage), _progress() as progress:
        points = explore.crash_points(subject, base)
        effects = len({p.address for p in points})
        todo = list(explore.pairs(points)) if options.pairs else [(p,) for p in points]
        task = progress.add_task(options.subject, total=len(todo))
        for some in todo:
            result = explore.at_point(subject, base, *some)
            explored += 1
            progress.advance(task)
            row = table.setdefault(some[0].operation, {})
            row[some[0].position] = row.get(some[0].position, 0) + 1
            if sum(result.fired.values()) < len(some):
                unfired += 1
            if not result.ok:
                failures.append(result)
                if not options.keep_going:
                    break
    took_s = time.perf_counter() - begun
    shown = Table("operation", *(f.label for f in POSITIONS), title=f"{options.subject}: effects × positions")
    for operation, row in sorted(table.items()):
        shown.add_row(operation, *(str(row.get(f.label, 0)) for f in POSITIONS))
    console.print(shown)
    wanted = len(todo)
    what = "pairs of crash points" if options.pairs else "crash points"
    if not options.pairs:
        console.print(f"{effects} effects × {len(POSITIONS)} positions = {effects * len(POSITIONS)}")
    console.print(f"{explored} of {wanted} {what} explored ({100 * explored / wanted:.0f} %) in {took_s:.1f} s")
    second = " (the second of a pair may have nothing left to strike)" if options.pairs else ""
    console.print(f"{explored - unfired} with every planned fault fired{second}, {len(failures)} with a broken invariant")
    if options.json:
        body = {
            "effects": effects, "positions": len(POSITIONS), "wanted": wanted, "explored": explored,
            "unfired": unfired, "failures": [explore.encoded(r) for r in failures], "seconds": round(took_s, 2), "table": table,
        }  # fmt: skip
        options.json.write_text(json.dumps(body, indent=2))
    if failures:
        _told_failure(failures[0], options)
    bad = bool(failures) or explored < wanted or (unfired > 0 and not options.pairs)
    console.print("[bold]FAILS[/bold]" if bad else f"holds: every invariant at every one of {explored} {what}")
    return int(bad)


# --- meta -------------------------------------------------------------------------------------------------------------


def meta(options: argparse.Namespace) -> int:
    """Each seed twice, in fresh processes whose sets iterate differently."""
    words = [
        sys.executable,
        "-m",
        "sim",
        "_traces",
        options.subject,
        "--seeds",
        str(options.seeds),
        "--first",
        str(options.first),
    ]
    words += ["--records", str(options.records), "--nodes", str(options.nodes), "--partitions", str(options.partitions)]
    words += ["--sample", str(options.sample)] if options.sample else []
    words += ["--plant-nondeterminism"] if options.plant_nondeterminism else []
    begun = time.perf_counter()
    children = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "4242")
    ]
    outs = [child.communicate()[0].splitlines() for child in children]
    if any(child.returncode for child in children):
        console.print("[bold]FAILS[/bold]: a process ended before its time")
        return 1
    digests = [dict(line.split() for line in out) for out in outs]
    different = [seed for seed in digests[0] if digests[0][seed] != digests[1].get(seed)]
    console.print(
        f"{len(digests[0])} seeds in two processes each, {len(different)} mismatches, {time.perf_counter() - begun:.1f} s"
    )
    if options.json:
        options.json.write_text(json.dumps({"seeds": len(digests[0]), "mismatches": different}))
    if len(digests[0]) != options.seeds or len(digests[1]) != options.seeds:
        console.print("[bold]FAILS[/bold]: not every seed was run")
        return 1
    if different:
        one = [
            *words[: words.index("--seeds") + 1],
            "1",
            "--first",
            different[0],
            *words[words.index("--first") + 2 :],
            "--events",
        ]
        traces = [
            subprocess.run(one, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed}, check=True).stdout
            for seed in ("1", "4242")
        ]
        pair = [text.splitlines() for text in traces]
        where = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
        console.print(f"[bold]FAILS[/bold]: seed {different[0]} first differs at event {where}:")
        for lines in pair:
            console.print(f"  {lines[where] if where < len(lines) else '(its trace has ended)'}", markup=False)
        return 1
    console.print("holds: the same events, whatever the hash seed")
    return 0


def traces(options: argparse.Namespace) -> int:
    """What `meta` starts: a line a seed with the digest of its trace; or the events themselves."""
    subject = loaded(options.subject, options.sample)
    prepared()
    base = base_plan(options)
    space = Range.of(subject, base)
    for number in range(options.first, options.first + options.seeds):
        plan = explore.plan_of(space, base, number)
        if options.plant_nondeterminism:
            plan = replace(plan, notes={**plan.notes, "nondeterminism": True})
        result = explore.simulate(subject, plan)
        if options.events:
            print("\n".join(line(event) for event in result.trace))
        else:
            print(number, result.digest)
    return 0


# --- replay -----------------------------------------------------------------------------------------------------------


def replay(options: argparse.Namespace) -> int:
    """One plan again. Exit 1 when it still breaks what it broke."""
    try:
        plan = Plan.read(options.file)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    subject = loaded(plan.subject, Path(str(plan.notes["sample"])) if plan.notes.get("sample") else None)
    prepared()
    with planted(plan.sabotage if not options.without_sabotage else ""):
        result = explore.simulate(subject, plan)
    for told in explore.story(result):
        console.print(told, markup=False)
    for violation in result.violations:
        console.print(f"{violation}", markup=False)
    for fault in plan.faults:
        console.print(f"fault: {fault.words()}")
    same = any(v.invariant == plan.invariant for v in result.violations) if plan.invariant else not result.ok
    if not result.ok:
        console.print(f"[bold]FAILS[/bold]: {'the same invariant' if same else 'another invariant'} as was recorded")
        return 1
    console.print("holds" + (f": {plan.invariant} is not broken any more" if plan.invariant else ""))
    return 0


# --- planted bugs -----------------------------------------------------------------------------------------------------


def sabotage(options: argparse.Namespace) -> int:
    """Plant each bug in turn and search for it; a bug that is not found, or a clean engine that is blamed, fails."""
    from catalogue.sabotage import FOCUS, INVARIANTS, PLANTS, RARE, REAL_ONLY, SPEC_ONLY

    subject = loaded(options.subject, options.sample)
    prepared()
    base = base_plan(options)
    space = Range.of(subject, base)
    names = options.names or [name for name in PLANTS if name not in REAL_ONLY | SPEC_ONLY | RARE]
    if unknown := [name for name in names if name not in PLANTS]:
        print(f"no planted bug is called {unknown[0]!r}", file=sys.stderr)
        return 2
    table = Table("planted bug", "found at seed", "by invariant", title=f"{subject.name}: {len(names)} planted bugs")
    found: dict[str, tuple[int, str]] = {}
    begun = time.perf_counter()
    broken: dict[str, set[str]] = {}
    for name in names:
        mine = {invariant for invariant, plants in INVARIANTS.items() if name in plants}
        with planted(name):
            for number in range(1, options.seeds + 1):
                result = explore.simulate(subject, explore.plan_of(space, base, number, FOCUS.get(name, ())))
                if not result.ok:
                    found.setdefault(name, (number, result.violations[0].invariant))
                    broken.setdefault(name, set()).update(v.invariant for v in result.violations)
                    if not mine or mine & broken[name]:
                        break  # found, and by the invariant that it must break
        fence.ESCAPES.clear()
        seed, invariant = found.get(name, (0, "-"))
        table.add_row(name, str(seed) if seed else "NOT FOUND", invariant)
        if not options.quiet:
            console.print(f"{name:<42} {seed or 'NOT FOUND'!s:>9}  {invariant}")
    survivors = [name for name in names if name not in found]
    idle = sorted(
        invariant for invariant, plants in INVARIANTS.items()
        if set(plants) <= set(names) and not any(invariant in broken.get(name, ()) for name in plants)
    )  # fmt: skip
    median = sorted(seed for seed, _ in found.values())[len(found) // 2] if found else 0
    console.print(
        f"{len(found)} of {len(names)} planted bugs found, median {median} seeds, {time.perf_counter() - begun:.0f} s; "
        f"survivors: {', '.join(survivors) or 'none'}; invariants that nothing broke: {', '.join(idle) or 'none'}"
    )
    if options.json:
        body = {"found": found, "survivors": survivors, "median": median, "invariants_unbroken": idle}
        options.json.write_text(json.dumps(body, indent=2))
    if survivors or idle or median > 50:
        console.print("[bold]FAILS[/bold]")
        return 1
    console.print("holds: every planted bug is found, and every invariant breaks by its own")
    return 0


# --- the command line -------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(prog="python -m sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call: Callable[[argparse.Namespace], int], help_: str | None) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help_) if help_ else commands.add_parser(name)
        one.set_defaults(call=call)
        return one

    for name, call, help_ in (
        ("run", run, "draw faults by seeds"),
        ("crashpoints", crashpoints, "every effect in every position"),
        ("meta", meta, "the same events in two processes"),
        ("_traces", traces, None),
        ("sabotage", sabotage, "plant each bug and see it found"),
    ):
        one = command(name, call, help_)
        one.add_argument("subject", metavar="PIPELINE")
        one.add_argument("--sample", type=Path, help="records, one a line")
        one.add_argument("--records", type=int, default=1_000 if name in ("run", "meta", "_traces", "sabotage") else 200)
        one.add_argument("--partitions", type=int, default=4)
        one.add_argument("--nodes", type=int, default=2)
        one.add_argument("--sabotage", default="", help="plant a bug")
        one.add_argument("--json", type=Path)
        one.add_argument("--first", type=int, default=1, help="the first seed")
        one.add_argument("--seeds", type=int, default={"run": 0, "sabotage": 600}.get(name, 200))
        one.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
        one.add_argument("--no-shrink", action="store_true")
        one.add_argument("--corpus", default=str(CORPUS), help="where a failure's plan is kept")
        if name == "run":
            one.add_argument("--seconds", type=float, default=0.0)
            one.add_argument("--seed", type=int, help="only this one")
            one.add_argument("--jobs", type=int, default=1)
        if name == "sabotage":
            one.add_argument("names", nargs="*", metavar="BUG", help="only these")
            one.add_argument("--quiet", action="store_true")
        if name == "crashpoints":
            one.add_argument("--pairs", action="store_true")
        if name in ("meta", "_traces"):
            one.add_argument("--plant-nondeterminism", action="store_true", help="iterate a set of strings, to see it found")
            one.add_argument("--events", action="store_true", help=argparse.SUPPRESS)
    one = command("replay", replay, "one plan again")
    one.add_argument("file", type=Path)
    one.add_argument("--without-sabotage", action="store_true", help="with the bug taken out")
    return top


def main(words: list[str] | None = None) -> int:
    """The exit status."""
    options = parser().parse_args(words)
    if getattr(options, "call", None) is run and not (options.seeds or options.seconds or options.seed is not None):
        options.seeds = 200
    if any(getattr(options, name, 1) < 1 for name in ("records", "partitions", "nodes", "jobs")):
        print("error: --records, --partitions, --nodes and --jobs are at least 1", file=sys.stderr)
        return 2
    status: int = options.call(options)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Measures a case: compiles every contender's programs, checks their results, and times together
those that are right."""

import concurrent.futures
import contextlib
import dataclasses
import statistics
from collections.abc import Callable

from scripts.bench import clock, machine, programs
from scripts.bench.cases import Case, free_inputs
from scripts.bench.peers import Contender

READY = "ready"  # the next step runs what was compiled
REFERENCE = "the dense reference, by which it is checked, failed"


@dataclasses.dataclass
class Row:
    """What is known of one contender in one case."""

    case: Case
    passes: str
    name: str
    status: str = "ok"  # or "wrong", "failed", "not run"; the reason says why
    reason: str = ""
    error: float | None = None  # the largest of the output's and the gradients'
    temporary_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)  # of one call, by round
    clock: str = ""  # that the seconds were read from
    sensors: dict[str, float] = dataclasses.field(default_factory=dict)
    # seconds of each kernel of a call, by name, longest first; {} by the wall clock
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""  # on the clock

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s."""
        return self.case.flops(self.passes) / self.median / 1e12 if self.median else None


def groups(contenders: list[Contender]) -> list[list[Contender]]:
    """Which contenders are timed together, one group after the other. On a GPU foreign code runs
    last, since it may corrupt the CUDA context, and the others once more beside it."""
    safe = [one for one in contenders if not one.is_foreign]
    separate = machine.on_gpu() and 0 < len(safe) < len(contenders)
    return [safe, contenders] if separate else [contenders]


def measure(
    contenders: list[Contender],
    case: Case,
    passes: list[str],
    rounds: int,
    jobs: int,
    time_by: str,
    say: Callable[[str, list[Row]], None] = lambda step, rows: None,
) -> list[Row]:
    """Rows by pass, then by contender; `jobs` programs are compiled at a time. Without rounds
    nothing is run: the rows say what memory the compiled programs take. Before each step `say` is
    told which it is, and what is known by then."""
    entries = [
        (Row(case, name, one.name), one)
        for name in passes
        for one in contenders
        if name in one.passes
    ]
    rows = [row for row, _ in entries]
    free_inputs()
    for row, one in entries:
        say(f"loading {row.name}", [])
        _load(row, one, is_run=rounds > 0)

    def compile_(entry):
        say(f"compiling {entry[0].name}, {entry[0].passes}", rows)
        _compile(*entry)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_, entries))
    if rounds < 1 or all(row.status != "ok" for row in rows):
        return rows
    say("compiling the reference", rows)
    for name in passes:
        with contextlib.suppress(Exception):  # the check reports it
            programs.reference(case, name)
    say(READY, rows)
    ready = {}
    for group in groups(contenders):
        ours = [(row, one) for row, one in entries if one in group and row.status == "ok"]
        for row, one in ours:
            if (row.passes, row.name) not in ready:
                say(f"checking {row.name}, {row.passes}", rows)
                with _report_errors(row):
                    ready[row.passes, row.name] = _check(row, one)
        for name in passes:
            together = [row for row, _ in ours if row.passes == name and row.status == "ok"]
            say(f"timing {', '.join(row.name for row in together)}, {name}", rows)
            _time({row.name: (row, ready[name, row.name]) for row in together}, rounds, time_by)
    return rows


def _time(together: dict[str, tuple[Row, programs.Program]], rounds: int, time_by: str):
    """A contender that raises is left out, and the others are timed again; where it was timed
    before, without foreign code, that stays."""
    while together:
        try:
            timing = clock.timing(
                {name: program for name, (_, program) in together.items()}, rounds, time_by
            )
        except clock.Failed as failure:
            row, _ = together.pop(failure.args[0])
            with _report_errors(row) if not row.seconds else contextlib.suppress(Exception):
                raise failure.__cause__ from None
            continue
        for name, (row, _) in together.items():
            row.seconds, row.clock, row.sensors = timing.seconds[name], timing.clock, timing.sensors
            row.kernels = timing.kernels.get(name, {})
            row.note = f"timed by {timing.clock}" if timing.clock != time_by else ""
        return


@contextlib.contextmanager
def _report_errors(row: Row):
    """Whatever a contender raises belongs in the report."""
    try:
        yield
    except (NotImplementedError, programs.TooLarge) as error:
        row.status, row.reason = "not run", str(error)
    except programs.NoReference as error:
        row.status, row.reason = "failed", f"{REFERENCE}: {error}"
    except Exception as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"


def _load(row: Row, contender: Contender, is_run: bool):
    """Imports the contender, and asks whether it can run the case."""
    with _report_errors(row):
        contender.load()
        reason = contender.why_not(row.case)
        if not is_run and contender.is_torch:
            reason = "XLA does not compile it, and counts no memory of it"
        if reason:
            row.status, row.reason = "not run", reason


def _compile(row: Row, contender: Contender):
    if row.status == "ok" and not contender.is_torch:
        with _report_errors(row):
            program = programs.compiled(contender, row.case, row.passes)
            row.temporary_bytes = program.memory_analysis().temp_size_in_bytes


def _check(row: Row, contender: Contender) -> programs.Program | None:
    """The program to time, or None where its results are wrong."""
    case = row.case
    program = programs.program(contender, case, row.passes)
    row.error, row.status, row.reason = programs.check(contender, case, row.passes)
    if row.status == "wrong":
        return None
    program.wait(program.call())  # a warm-up, which fails here if it fails
    return program

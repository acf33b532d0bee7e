"""Measures a case: compiles every contender's programs, checks their results, and times together
those that are right."""

import concurrent.futures
import contextlib
import dataclasses
import statistics

from scripts.bench import clock, machine, programs
from scripts.bench.cases import PASSES, Case, forget_inputs
from scripts.bench.peers import Contender


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
    seconds: list[float] = dataclasses.field(default_factory=list)  # of one call, round after round
    clock: str = ""  # that told the seconds
    sensors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def tflops(self) -> float | None:
        """A second."""
        return self.case.flops(self.passes) / self.median / 1e12 if self.median else None


def groups(contenders: list[Contender]) -> list[list[Contender]]:
    """Who is measured together in all cases, group after group. On a GPU foreign code comes last,
    since it may spoil the CUDA context, and the others once more beside it."""
    own = [one for one in contenders if not one.is_foreign]
    return (
        [own, contenders] if machine.on_gpu() and 0 < len(own) < len(contenders) else [contenders]
    )


def measure(
    contenders: list[Contender], case: Case, passes: list[str], rounds: int, jobs: int, time_by: str
) -> list[Row]:
    """Rows by pass, then by contender; `jobs` programs are compiled at a time."""
    asked = [
        (Row(case, name, one.name), one)
        for name in passes
        for one in contenders
        if name in one.passes
    ]
    forget_inputs()
    for row, one in asked:
        _ask(row, one)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda row_and_one: _compile(*row_and_one), asked))
    ready = {}
    for row, one in asked:
        with _verdict(row):
            if row.status == "ok":
                ready[row.passes, row.name] = _check(row, one)
    rows = [row for row, _ in asked]
    for name in passes:
        together = [row for row in rows if row.passes == name and row.status == "ok"]
        _time({row.name: (row, ready[name, row.name]) for row in together}, rounds, time_by)
    return rows


def _time(together: dict[str, tuple[Row, programs.Program]], rounds: int, time_by: str):
    """One that raises is left out, and the others are timed anew."""
    while together:
        try:
            timing = clock.timing(
                {name: program for name, (_, program) in together.items()}, rounds, time_by
            )
        except clock.Failed as failure:
            row, _ = together.pop(failure.args[0])
            with _verdict(row):
                raise failure.__cause__ from None
            continue
        for name, (row, _) in together.items():
            row.seconds, row.clock, row.sensors = timing.seconds[name], timing.clock, timing.sensors
        return


@contextlib.contextmanager
def _verdict(row: Row):
    """Whatever a contender raises belongs in the report."""
    try:
        yield
    except (NotImplementedError, programs.TooLarge) as error:
        row.status, row.reason = "not run", str(error)
    except Exception as error:
        row.status, row.reason = "failed", f"{type(error).__name__}: {error}"


def _ask(row: Row, contender: Contender):
    """Whether it can be asked for the case; imports it."""
    with _verdict(row):
        contender.load()
        if reason := contender.why_not(contender.takes(row.case)):
            row.status, row.reason = "not run", reason


def _compile(row: Row, contender: Contender):
    if row.status == "ok" and not contender.is_torch:
        with _verdict(row):
            program = programs.compiled(contender, contender.takes(row.case), row.passes)
            row.temporary_bytes = program.memory_analysis().temp_size_in_bytes


def _check(row: Row, contender: Contender) -> programs.Program | None:
    """The program to time, or None where its results are wrong."""
    case = contender.takes(row.case)
    program = programs.program(contender, case, row.passes)
    row.error, row.status, row.reason = programs.check(contender, case, row.passes)
    if row.status == "wrong":
        return None
    program.wait(program.call())  # warm, and what fails, fails here
    return program


def memory(contender: Contender, case: Case) -> Row:
    """Compiles forward+backward and runs nothing."""
    row = Row(case, PASSES[-1], contender.name)
    _ask(row, contender)
    _compile(row, contender)
    return row

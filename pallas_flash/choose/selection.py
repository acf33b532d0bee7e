"""Selects the implementation of a call by its argument, the environment, the table's order and this
machine's self-check, and says why not another."""

import dataclasses
import os
import warnings
from collections.abc import Iterable
from typing import ClassVar

from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import comparison, verdicts
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.implementation import Choice, Implementation
from pallas_flash.tiled.blockwise.implementation import blockwise_tangent

JAX_NN_NAMES = ("xla", "cudnn")  # jax.nn's implementations; here they choose, as None does


def choose(problem: Problem, name: str | None = None, check: bool = True) -> tuple[Problem, Choice]:
    """The requested implementation, or the first that is a default and right on this machine, and
    the variant of the problem that it runs. Without `check` nothing runs, and kernels never checked
    count as right."""
    return first(problem, name, Objections(problem, check))


def requested(implementation: str | None = None) -> str | None:
    """The implementation that a call names, or else PALLAS_FLASH_IMPLEMENTATION."""
    if not isinstance(implementation, str | None) or implementation not in (None, *JAX_NN_NAMES):
        return implementation
    name = os.environ.get("PALLAS_FLASH_IMPLEMENTATION") or None
    if name is not None and name not in (names := implementations.names()):
        raise ValueError(
            f"PALLAS_FLASH_IMPLEMENTATION must be unset or one of {', '.join(names)}; got {name!r}."
        )
    return name


@dataclasses.dataclass(frozen=True)
class Objections:
    """The reasons against an implementation for a call; None: there is none."""

    problem: Problem
    check: bool | None = False  # whether self-checks run; None: they do not count
    NAME: ClassVar[str] = "call"

    def cannot(self, implementation: Implementation) -> str | None:
        """Why it cannot run the call."""
        return implementation.why_no_lists(self.problem) or implementation.why_not(
            implementation.converted(self.problem)
        )

    def by_default(self, implementation: Implementation) -> str | None:
        """Why it does not run the call unless it is named."""
        return implementation.why_not_by_default(self.problem)

    def right(self, implementation: Implementation) -> verdicts.Right:
        """The variant of the problem that this machine's self-check, where it has run or may run,
        finds right, and what failed before it."""
        if self.check is None:
            return verdicts.Right(self.problem)
        return verdicts.first_right(implementation, *self.checked(implementation), self.check)

    def is_known(self, implementation: Implementation) -> bool:
        """Whether the self-check has a verdict on the variant that runs."""
        problem, (_, entry) = self.right(implementation).problem, self.checked(implementation)
        return problem is None or verdicts.is_known(implementation, problem, entry)

    def checked(
        self, implementation: Implementation
    ) -> tuple[Iterable[Problem], comparison.EntryPoint]:
        """What the self-check runs: variants, in order of preference."""
        return implementation.variants(self.problem), comparison.FLASH_ATTENTION


def first(
    problem: Problem, name: str | None = None, objections: Objections | None = None
) -> tuple[Problem, Choice]:
    """The implementation of this name, which runs the problem as it is, or the first in the table
    without a reason against it, and the variant that it runs; without `objections` self-checks give
    no reasons."""
    objections = objections or Objections(problem, None)
    if name is None:
        # the cheap check comes first: why_not may import kernels
        is_able = lambda each: not (objections.by_default(each) or objections.cannot(each))
        able = filter(is_able, implementations.IMPLEMENTATIONS)
        found = ((each, objections.right(each).problem) for each in able)
        implementation, problem = next(pair for pair in found if pair[1] is not None)
        if objections.check:
            _warn_of_rules(implementation, objections)
    elif isinstance(name, str) and name in implementations.names():
        implementation = implementations.find(name)
        if why_not := objections.cannot(implementation):
            raise NotImplementedError(
                f"implementation {name!r} cannot run this {objections.NAME}: {why_not}. The call: "
                f"{problem}."
            )
    else:
        is_tokamax = "mosaic" in str(name)
        hint = (
            " tokamax's mosaic is hopper, blackwell or ampere here: pass None."
            if is_tokamax
            else ""
        )
        raise ValueError(
            f"implementation must be None or one of {', '.join(implementations.names())}, or "
            f"jax.nn's {' or '.join(JAX_NN_NAMES)}, which mean the same as None; "
            f"got {name!r}.{hint}"
        )
    return problem, Choice(implementation, implementation.tiles(implementation.converted(problem)))


def _warn_of_rules(taken: Implementation, objections: Objections):
    """Warns where a mask_mod or score_mod alone keeps all GPU kernels from a call."""
    p, mask = objections.problem, objections.problem.resolved_mask
    rules = [rule for rule in (mask.mask_mod, p.score) if rule is not None]
    if taken.own_kernels or not rules:
        return
    without = dataclasses.replace(
        p, score=None, resolved_mask=dataclasses.replace(mask, mask_mod=None)
    )
    without = dataclasses.replace(objections, problem=without)
    could = lambda each: not (without.by_default(each) or without.cannot(each))
    kernels = [x for x in implementations.IMPLEMENTATIONS if x.own_kernels and could(x)]
    reasons = {each.name: objections.cannot(each) for each in kernels}
    if reasons and all(reasons.values()):
        why_not = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        warnings.warn(
            f"pallas_flash: no GPU kernel evaluates the rules of this call. Falling back to "
            f"{taken.name!r}, which is plain JAX. {why_not}. docs/masks.md says what kernels "
            "evaluate.",
            RuntimeWarning,
            stacklevel=2,
        )


def checked_tangent(implementation: Implementation, problem: Problem, tiles, *args):
    """The forward mode of kernels, which is checked where it is first used; blockwise's, if it is
    wrong."""
    entry, instead = comparison.FORWARD_MODE, "blockwise's forward mode"
    is_wrong = (
        implementation.has_tangent(tiles)
        and verdicts.first_right(implementation, [problem], entry, instead=instead).problem is None
    )
    if is_wrong:
        return blockwise_tangent(implementation.log_base(problem), problem, *args)
    return implementation.tangent(problem, tiles, *args)


def is_right(implementation: Implementation, problem: Problem) -> bool:
    """Whether kernels that calls under vmap would run side by side pass the self-check."""
    instead = "the kernels of one call after another"
    return verdicts.first_right(implementation, [problem], instead=instead).problem is not None


def reasons(
    taken: Implementation, argument: str | None, objections: Objections
) -> tuple[dict[str, str], str | None]:
    """Why each other implementation was not taken, and the condition on which `taken` was."""
    name = requested(argument)
    failed = {} if name else objections.right(taken).failed
    conditions = [f"whose variant {scheme!r} is {why_not}" for scheme, why_not in failed.items()]
    if argument in JAX_NN_NAMES:
        conditions.append(f"chosen: {argument!r} is a name of jax.nn, and chooses as None does")
    if name is None and not objections.is_known(taken):
        conditions.append(
            "if its self-check passes on this machine: the first call runs it, or python -m "
            "pallas_flash"
        )
    elif name not in (None, argument):
        conditions.append("as PALLAS_FLASH_IMPLEMENTATION says")

    def why_not(implementation: Implementation) -> str:
        if reason := objections.cannot(implementation):
            return reason
        if name is not None:
            return f"{taken.name} was selected by name"
        return (
            objections.by_default(implementation)
            or _failed_check(objections.right(implementation))
            or f"{taken.name} comes before it"
        )

    others = [each for each in implementations.IMPLEMENTATIONS if each is not taken]
    return {each.name: why_not(each) for each in others}, ", ".join(conditions) or None


def _failed_check(right: verdicts.Right) -> str | None:
    """Why no variant is right; None: one is."""
    return right.why_not if right.problem is None else None

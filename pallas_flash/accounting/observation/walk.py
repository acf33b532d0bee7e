"""Runs jaxprs on values of which some are unknown: integers are computed, because loops and indices
depend on them."""

from typing import Any

import numpy as np


class _Unknown:
    """A value that is not computed."""

    def __repr__(self):
        return "unknown"


UNKNOWN: Any = _Unknown()


def known(x, what: str):
    if x is UNKNOWN:
        raise ValueError(
            f"{what} depends on data that is not given: pass arrays, not their shapes."
        )
    return np.asarray(x)


class Walk:
    """A primitive called x is run by the method _x where there is one, and else computed where all
    that it takes is known."""

    def run(self, jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        read = lambda v: v.val if hasattr(v, "val") else values[v]
        for eqn in jaxpr.eqns:
            rule = getattr(self, f"_{eqn.primitive.name}", self._plain)
            results = rule(eqn, [read(v) for v in eqn.invars], eqn.params)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _plain(self, eqn, args, params):
        if any(x is UNKNOWN for x in args):
            return [UNKNOWN] * len(eqn.outvars)
        result = eqn.primitive.bind(*args, **params)
        return result if eqn.primitive.multiple_results else [result]

    # Calls and control flow

    def _call(self, eqn, args, params):
        inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)

    _jit = _pjit = _closed_call = _core_call = _custom_jvp_call = _custom_vjp_call = _checkpoint = (
        _call
    )

    def _platform_index(self, eqn, args, params):
        return [len(params["platforms"]) - 1]  # the default: the same kernel, for the interpreter

    def _cond(self, eqn, args, params):
        branches = params["branches"]
        index = int(known(args[0], "a condition"))
        branch = branches[min(max(index, 0), len(branches) - 1)]
        return self.run(branch.jaxpr, branch.consts, args[1:])

    def _while(self, eqn, args, params):
        cond, body, n = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
        cond_consts, body_consts, carry = (
            args[:n],
            args[n : n + params["body_nconsts"]],
            args[n + params["body_nconsts"] :],
        )
        while known(
            self.run(cond.jaxpr, cond.consts, [*cond_consts, *carry])[0], "the end of a loop"
        ):
            carry = self.run(body.jaxpr, body.consts, [*body_consts, *carry])
        return carry

    def _scan(self, eqn, args, params):
        body, consts, length = params["jaxpr"], args[: params["num_consts"]], params["length"]
        end = params["num_consts"] + params["num_carry"]
        carry, xs, rows = args[params["num_consts"] : end], args[end:], []
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            x = [x if x is UNKNOWN else x[i] for x in xs]
            out = self.run(body.jaxpr, body.consts, [*consts, *carry, *x])
            carry = out[: params["num_carry"]]
            rows.append(out[params["num_carry"] :])
        rows = rows[:: -1 if params["reverse"] else 1]
        stack = lambda ys: UNKNOWN if any(y is UNKNOWN for y in ys) else np.stack(ys)
        return [*carry, *(stack(ys) for ys in zip(*rows, strict=True))]

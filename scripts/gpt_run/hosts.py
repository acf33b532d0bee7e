"""One run by several processes, each of which has devices of its own: they compute alike, and the
first of them writes."""

import contextlib
import io

from scripts.gpt_run.stops import Refused


@contextlib.contextmanager
def joined(args):
    """Waits for the others of --hosts; then all devices are seen by each, and the first process
    alone speaks."""
    if args.hosts is None:
        yield
        return
    if not (args.mesh and (args.resume or args.out)) or args.check or args.eval_only:
        raise Refused(
            "--hosts is for training on a --mesh, with a folder that all processes see: --out or "
            "--resume."
        )
    import jax

    if args.simulate_devices:
        jax.config.update("jax_num_cpu_devices", args.simulate_devices)
    try:
        jax.distributed.initialize(**args.hosts)
    except (RuntimeError, ValueError) as error:
        raise Refused(f"--hosts: {error}") from None
    with contextlib.nullcontext() if is_first() else contextlib.redirect_stdout(io.StringIO()):
        yield
    jax.distributed.shutdown()  # which waits for the others: not where this one failed


def are_several() -> bool:
    import jax

    return jax.process_count() > 1


def is_first() -> bool:
    import jax

    return jax.process_index() == 0


def everywhere(x):
    """An array that each process has, for a program of all."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    if not are_several():
        return jax.numpy.asarray(x)
    return jax.make_array_from_callback(
        x.shape, NamedSharding(jax.sharding.get_mesh(), P()), x.__getitem__
    )

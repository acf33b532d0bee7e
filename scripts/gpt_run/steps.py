"""The model, its training step and its evaluation, as pure functions of a state."""

import math

from scripts.gpt_run.mesh import kept, spread


def new_model(args, window: int | None = None, context=None):
    """(structure, parameters) of a GPT from the seed."""
    from flax import nnx

    from models.gpt import GPT, GPTConfig

    config = GPTConfig(
        vocab_size=args.vocabulary,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        features=args.features,
        hidden_features=4 * args.features,
        window=window,
        tied=not args.untied,
        dropout=args.dropout,
        implementation=args.attention,
        context=context,
        dtype=args.dtype,
    )
    return nnx.split(GPT(config, rngs=nnx.Rngs(args.seed)))


def new_optimizer(args):
    import jax
    import optax

    is_matrix = lambda parameters: jax.tree.map(lambda p: p.ndim > 1, parameters)
    adamw = optax.adamw(
        learning_rate(args), b2=0.95, weight_decay=args.weight_decay, mask=is_matrix
    )
    return optax.chain(optax.clip_by_global_norm(args.clip), adamw)


def learning_rate(args):
    """Of a step, counted from 0: up in a straight line, down along a cosine."""
    import optax

    peak, warmup = args.learning_rate, args.warmup
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, max(args.steps, warmup + 1), peak / 10
    )


def new_state(args, parameters, optimizer) -> dict:
    """All that a checkpoint holds. The curves are a part of it, so that a resumed run continues
    them bit for bit."""
    import jax.numpy as jnp

    return dict(
        step=jnp.int32(0),
        parameters=parameters,
        optimizer=optimizer.init(parameters),
        train_losses=jnp.full(args.steps, jnp.nan),
        held_out_losses=jnp.full(args.steps, jnp.nan),  # where it was measured
    )


def loss_of(structure, parameters, windows, key=None):
    """Mean nats a byte of windows [B, context + 1]; with a key for dropout it is training."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    windows = windows.astype(jnp.int32)
    rngs = None if key is None else nnx.Rngs(dropout=key)
    logits = nnx.merge(structure, parameters)(spread(windows[:, :-1]), rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def loss_and_gradients(structure, parameters, windows, parts: int, key=None):
    """Of all windows, taken in `parts` one after another."""
    import jax
    import jax.numpy as jnp

    of = jax.value_and_grad(
        lambda parameters, windows, key: loss_of(structure, parameters, windows, key)
    )
    if parts == 1:
        return of(parameters, windows, key)
    add = lambda sums, part: (jax.tree.map(jnp.add, sums, of(parameters, *part)), None)
    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters)
    keys = None if key is None else jax.random.split(key, parts)
    sums, _ = jax.lax.scan(add, zeros, (windows.reshape(parts, -1, windows.shape[-1]), keys))
    return jax.tree.map(lambda x: x / parts, sums)


def train_step(args, structure, optimizer):
    """step(state, text) -> state, loss. Batch and dropout follow from the seed and the number of
    the step alone."""
    import jax
    import jax.numpy as jnp
    import optax

    def step(state, text):
        key = jax.random.fold_in(jax.random.key(args.seed), state["step"])
        starts = jax.random.randint(key, (args.batch, 1), 0, text.size - args.context)
        windows = text[starts + jnp.arange(args.context + 1)]
        dropout = jax.random.fold_in(key, 1) if args.dropout else None
        loss, gradients = loss_and_gradients(
            structure, state["parameters"], windows, args.accumulate, dropout
        )
        updates, optimizer_state = optimizer.update(
            gradients, state["optimizer"], state["parameters"]
        )
        new = dict(
            step=state["step"] + 1,
            parameters=optax.apply_updates(state["parameters"], updates),
            optimizer=optimizer_state,
            train_losses=state["train_losses"].at[state["step"]].set(loss),
            held_out_losses=state["held_out_losses"],
        )
        return kept(new), loss

    return jax.jit(step, donate_argnums=0)


def evaluation(structure, windows):
    """evaluate(state) -> state, with the held-out loss after its last step noted."""
    import jax

    # few at once need little memory
    groups = windows.reshape(-1, math.gcd(len(windows), 16), windows.shape[-1])

    def evaluate(state):
        losses = jax.lax.map(lambda group: loss_of(structure, state["parameters"], group), groups)
        return kept(
            state
            | dict(
                held_out_losses=state["held_out_losses"].at[state["step"] - 1].set(losses.mean())
            )
        )

    return jax.jit(evaluate, donate_argnums=0)

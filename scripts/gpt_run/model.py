"""The model, as pure functions of a state: its training step, its evaluation, and text from it."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.gpt import GPT, GPTConfig
from scripts.gpt_run.devices import context_parallelism, shard_tokens, shardings
from scripts.gpt_run.options import BYTES


def new_model(args, **changes) -> GPT:
    config = dict(
        vocab_size=args.vocabulary,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        features=args.features,
        hidden_features=4 * args.features,
        tied=not args.untied,
        dropout=args.dropout,
        implementation=args.attention,
        context=context_parallelism(args),
        dtype=args.dtype,
    )
    return GPT(GPTConfig(**config | changes), rngs=nnx.Rngs(args.seed))


def model_structure(args, **changes):
    """The model without its parameters, for nnx.merge."""
    return nnx.graphdef(nnx.eval_shape(lambda: new_model(args, **changes)))


def generator_structure(args):
    """It generates text of any length, and looks back as far as in training."""
    return model_structure(args, window=args.context, context=None)


def new_optimizer(args):
    is_matrix = lambda parameters: jax.tree.map(lambda p: p.ndim > 1, parameters)
    decay = dict(weight_decay=args.weight_decay, mask=is_matrix)
    return optax.chain(
        optax.clip_by_global_norm(args.clip), optax.adamw(learning_rate(args), b2=0.95, **decay)
    )


def learning_rate(args):
    """The rate of a step, counted from 0: a linear warmup, then a cosine."""
    peak, warmup = args.learning_rate, args.warmup
    return optax.warmup_cosine_decay_schedule(
        peak / (warmup + 1), peak, warmup, args.steps, peak / 10
    )


def new_state(args) -> dict:
    parameters = nnx.state(new_model(args))
    optimizer = new_optimizer(args).init(parameters)
    return dict(step=jnp.int32(0), parameters=parameters, optimizer=optimizer)


def abstract_state(args) -> dict:
    """Shapes, dtypes and shardings of a state."""
    state = jax.eval_shape(lambda: new_state(args))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings(state),
    )


def initial_state(args) -> dict:
    where = jax.tree.map(lambda x: x.sharding, abstract_state(args))
    return jax.jit(lambda: new_state(args), out_shardings=where)()


def mean_loss(structure, parameters, windows, key=None):
    """Nats per byte, with dropout if there is a key for it."""
    windows = windows.astype(jnp.int32)
    rngs = None if key is None else nnx.Rngs(dropout=key)
    logits = nnx.merge(structure, parameters)(shard_tokens(windows[:, :-1]), rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def loss_and_gradients(structure, parameters, windows, steps: int, key=None):
    """Loss and gradients of all windows, accumulated over `steps` parts of them."""
    differentiate = jax.value_and_grad(lambda *inputs: mean_loss(structure, *inputs))
    if steps == 1:
        return differentiate(parameters, windows, key)

    def accumulate(sums, inputs):
        return jax.tree.map(jnp.add, sums, differentiate(parameters, *inputs)), None

    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, parameters)
    keys = None if key is None else jax.random.split(key, steps)
    windows = windows.reshape(steps, -1, windows.shape[-1])
    sums, _ = jax.lax.scan(accumulate, zeros, (windows, keys))
    return jax.tree.map(lambda x: x / steps, sums)


def train_step(args, structure):
    """step(state, text) -> state, loss. Batch and dropout follow from the seed and the step."""
    optimizer = new_optimizer(args)

    def step(state, text):
        key = jax.random.fold_in(jax.random.key(args.seed), state["step"])
        starts = jax.random.randint(key, (args.batch, 1), 0, text.size - args.context)
        windows = text[starts + jnp.arange(args.context + 1)]
        dropout = jax.random.fold_in(key, 1) if args.dropout else None
        parameters = state["parameters"]
        loss, gradients = loss_and_gradients(
            structure, parameters, windows, args.accumulate, dropout
        )
        updates, optimizer_state = optimizer.update(gradients, state["optimizer"], parameters)
        parameters = optax.apply_updates(parameters, updates)
        return dict(step=state["step"] + 1, parameters=parameters, optimizer=optimizer_state), loss

    where = jax.tree.map(lambda x: x.sharding, abstract_state(args))
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None))


def evaluation(structure, windows):
    """evaluate(parameters) -> the mean loss of the windows."""
    # few at once need little memory
    groups = jnp.asarray(windows).reshape(-1, math.gcd(len(windows), 16), windows.shape[-1])
    return jax.jit(
        lambda parameters: jax.lax.map(
            lambda group: mean_loss(structure, parameters, group), groups
        ).mean()
    )


# ---- text, byte by byte: prompts of different lengths in one batch ----


class Sampling(NamedTuple):
    """How the next byte is drawn: from softmax(logits / temperature), among the likeliest bytes."""

    temperature: float  # 0: the likeliest byte
    top_k: int | None = None  # how many of the likeliest
    top_p: float = 1.0  # the fewest whose probabilities add up to it


def choose(logits, keys, sampling: Sampling):
    """The next byte [B] of logits [B, V], with a key per row."""
    logits = logits[:, :BYTES]
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1)
    logits, order = jax.lax.top_k(logits / sampling.temperature, sampling.top_k or BYTES)
    p = jax.nn.softmax(logits)
    likelier = jnp.cumsum(p, -1) - p  # 0 for the first, which always stays
    logits = jnp.where(likelier < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0]


def generate(structure, parameters, prompts: list[bytes], length: int, sampling: Sampling, seed):
    """Yields the bytes [B] that come next, `length` times, from a model with a window: its caches
    hold no more than that. What a row draws follows from the seed and its prompt, and for equal
    prompts from their order."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    model = nnx.merge(structure, parameters)
    chunk = min(model.config.window, lengths.max())
    tokens = np.zeros((len(prompts), -(-lengths.max() // chunk) * chunk), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    copies = np.array([prompts[:i].count(prompt) for i, prompt in enumerate(prompts)])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), copies)

    @functools.partial(jax.jit, donate_argnums=1)
    def read(parameters, caches, logits, tokens, counts):
        new, caches = nnx.merge(structure, parameters)(tokens, caches, lengths=counts)
        last = jnp.take_along_axis(new, jnp.maximum(counts, 1)[:, None, None] - 1, 1)[:, 0]
        return jnp.where(counts[:, None] > 0, last, logits), caches

    @functools.partial(jax.jit, donate_argnums=1)
    def step(parameters, caches, logits, i):
        byte = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i), sampling)
        logits, caches = nnx.merge(structure, parameters)(byte[:, None], caches)
        return byte.astype(jnp.uint8), logits[:, 0], caches

    logits = jnp.float32(0)
    caches = model.init_rolling_cache(len(prompts), chunk)
    for start in range(0, tokens.shape[1], chunk):
        counts = np.clip(lengths - start, 0, chunk)
        chunk_tokens = tokens[:, start : start + chunk]
        logits, caches = read(parameters, caches, logits, chunk_tokens, counts)
    byte = None
    for i in range(length):
        previous = byte
        byte, logits, caches = step(parameters, caches, logits, i)
        if previous is not None:  # read while the next one is computed
            yield np.asarray(previous)
    yield np.asarray(byte)

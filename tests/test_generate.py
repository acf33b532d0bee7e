"""scripts/generate.py: what is drawn, that a batch and a cache change nothing, what is written, and
its errors."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trainer import error_of

from scripts import generate
from scripts.gpt_run import model
from scripts.gpt_run.console import Row
from scripts.gpt_run.folder import load
from scripts.gpt_run.model import (
    Sampling,
    abstract_state,
    choose,
    generator_structure,
    model_structure,
)
from scripts.gpt_run.options import run_settings

pytestmark = pytest.mark.usefixtures("compiled_once")
PROMPTS = ["cab ", "a banana cabana in a bin, nab it", "cab "]


@pytest.fixture(scope="module")
def settings(finished_run):
    return run_settings(finished_run)


@pytest.fixture(scope="module")
def parameters(finished_run, settings):
    return load(finished_run, abstract_state(settings))["parameters"]


def written(capsys, *arguments) -> str:
    generate.main(list(map(str, arguments)))
    return capsys.readouterr().out


def several(prompts) -> list[str]:
    return [word for text in prompts for word in ("--prompt", text)]


@pytest.mark.whole
def test_a_batch_writes_what_each_prompt_writes_alone_and_equal_prompts_differ(
    finished_run, capsys
):
    options = [finished_run, *"--max-bytes 30 --temperature 1 --top-k 50 --top-p 0.9".split()]
    together = written(capsys, *options, *several(PROMPTS))
    _, *texts = together.replace("\n--- prompt", "--- prompt").split("--- prompt ")
    texts = [text[2:] for text in texts]  # behind the number
    alone = written(capsys, *options, "--prompt", PROMPTS[0])
    assert texts[0].rstrip("\n") == alone.rstrip("\n")
    assert texts[2] != texts[0]
    assert written(capsys, *options, "--prompt", PROMPTS[0], "--seed", 1) != alone


@pytest.mark.whole
def test_the_cache_writes_what_the_whole_text_computed_again_each_time_does(
    finished_run, settings, parameters, capsys
):
    model = nnx.merge(generator_structure(settings), parameters)
    tokens = np.frombuffer(PROMPTS[1].encode(), np.uint8)
    padded = np.pad(tokens, (0, 30))
    forward = jax.jit(lambda model, tokens: model(tokens))
    for end in range(len(tokens), len(padded)):
        logits = forward(model, jnp.asarray(padded[None], jnp.int32))
        padded[end] = logits[0, end - 1, :256].argmax()
    greedy = [finished_run, "--temperature", 0, "--max-bytes", 30]
    text = written(capsys, *greedy, "--prompt", PROMPTS[1])
    row = Row()
    for byte in padded:
        row.add(int(byte))
    row.finish()
    assert text == row.take() + "\n"


def test_the_model_sees_as_far_back_as_its_training_did_and_keeps_no_more(settings, parameters):
    run = jax.jit(
        lambda structure, tokens: nnx.merge(structure, parameters)(tokens), static_argnums=0
    )
    generator, trained = generator_structure(settings), model_structure(settings)
    reach = settings.layers * (settings.context - 1)  # of as many windows, one on the other
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, reach + 10)))
    logits, changed = run(generator, tokens), run(generator, tokens.at[:, 0].add(1))
    full = run(trained, tokens)
    within, beyond = slice(settings.context), slice(settings.context, None)
    np.testing.assert_allclose(logits[:, within], full[:, within], atol=1e-5)
    assert not np.allclose(logits[:, beyond], full[:, beyond], atol=1e-4)
    np.testing.assert_array_equal(logits[:, reach + 1 :], changed[:, reach + 1 :])

    prompts, sampling = [b"a" * 60, b"b"], Sampling(0.0)
    before = {id(x) for x in jax.live_arrays()}
    generated = model.generate(generator, parameters, prompts, 10**6, sampling, 0)
    next(generated)
    assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 10**5


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.4, 0.1, 0.3, 0.2]),
        (Sampling(0.5), np.square([0.4, 0.1, 0.3, 0.2]) / 0.3),
        (Sampling(1.0, top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.65), [4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.75), [4 / 9, 0, 3 / 9, 2 / 9]),
        (Sampling(1.0, top_p=1e-6), [1, 0, 0, 0]),
        (Sampling(0.0, top_p=0.9), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_bytes_are_drawn_as_often_as_they_should_be(sampling, expected, draws=4000):
    p = np.pad([0.4, 0.1, 0.3, 0.2], (0, 252), constant_values=1e-9)
    logits, keys = jnp.tile(jnp.log(p), (draws, 1)), jax.random.split(jax.random.key(0), draws)
    got = np.bincount(choose(logits, keys, sampling), minlength=256) / draws
    expected = np.array(expected)
    deviation = np.sqrt(np.maximum(expected * (1 - expected) / draws, 1e-9))
    assert np.all(np.abs(got[:4] - expected) < 5 * deviation)
    assert got[4:].sum() < 1e-3


def test_a_row_ends_before_its_stop_string_and_shows_no_part_of_it():
    row, shown = Row(b"\nend"), []
    for byte in "a\nen ü\x1b\ne".encode() + b"\xff\nendless":
        row.add(byte)
        shown.append(row.take())
    assert "".join(shown) == "a\nen ü\ufffd\ne\ufffd"
    assert row.is_done
    assert shown[:5] == ["a", "", "", "", "\nen "], "held back as long as it may be the stop string"


class Flushed(io.StringIO):
    """What stood there at each flush."""

    def flush(self):
        self.texts = [*getattr(self, "texts", []), self.getvalue()]


def test_text_is_written_as_it_comes_and_speed_is_told_on_stderr(finished_run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", out := Flushed())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cab")))
    generate.main([str(finished_run), "--max-bytes", "9"])
    assert out.texts[0] == "a cab"
    assert len(out.texts) == 1 + 9, "the prompt, and each byte"
    errors = capsys.readouterr().err
    loads, compiles, speed = errors.splitlines()
    assert loads == f"loads jax and the checkpoint of {finished_run}"
    assert compiles == "compiles the model, for the prompts and for a byte"
    assert speed.startswith("first byte after ") and speed.endswith(" bytes/s")


def test_all_rows_end_at_their_stop_string(finished_run, capsys, monkeypatch):
    only_x = lambda logits, keys, sampling: jnp.full(len(logits), ord("x"))
    monkeypatch.setattr(model, "choose", only_x)
    options = [finished_run, "--stop", "xxx", "--max-bytes", 99]
    text = written(capsys, *options, *several(PROMPTS[:2]))
    assert text == f"--- prompt 1\n{PROMPTS[0]}\n--- prompt 2\n{PROMPTS[1]}\n"


ERRORS = {
    "nowhere --prompt a": "is not the folder of a run",
    "{run} --prompt=": "a prompt must be at least a byte long",
    "{run} --prompt a --attention hopper": "--attention: ",
    "{empty} --prompt a": "has no checkpoint yet",
}


def test_an_error_is_one_line(finished_run, tmp_path):
    (tmp_path / "config.json").write_bytes((finished_run / "config.json").read_bytes())
    for typed, message in ERRORS.items():
        typed = typed.format(run=finished_run, empty=tmp_path)
        assert message in error_of(generate.main, *typed.split())


@pytest.mark.parametrize(
    "option", ["--top-k 0", "--top-p 1.5", "--temperature -1", "--max-bytes 0"]
)
def test_an_option_out_of_range_is_named(option, capsys):
    with pytest.raises(SystemExit):
        generate.main(["run", "--prompt", "a", *option.split()])
    assert option.split()[0] in capsys.readouterr().err

"""scripts/generate.py: what is drawn, that a batch and a cache change nothing, what is written, and
its errors."""

import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scripts import generate, train_gpt
from scripts.gpt_run.generation import Row, Sampling, choose, compiled
from scripts.gpt_run.steps import new_model

CONTEXT = 24
PROMPTS = ["cab ", "a banana cabana in a bin, nab it", "cab "]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("banana cabana\na cabin abacus\ncab in a bin\n" * 50)
    sizes = (
        f"--layers 2 --heads 2 --kv-heads 1 --features 16 --context {CONTEXT} --batch 3 "
        "--steps 4 --sample-length 1"
    ).split()
    train_gpt.main([*sizes, "--data", str(folder / "text.txt"), "--out", str(folder / "run")])
    return folder / "run"


def written(capsys, *arguments) -> str:
    generate.main(list(map(str, arguments)))
    return capsys.readouterr().out


def several(prompts) -> list[str]:
    return [word for text in prompts for word in ("--prompt", text)]


@pytest.mark.whole
def test_a_batch_writes_what_each_prompt_writes_alone_and_equal_prompts_differ(run, capsys):
    options = [run, "--max-bytes", 30, "--temperature", 1, "--top-k", 50, "--top-p", 0.9]
    together = written(capsys, *options, *several(PROMPTS))
    _, *texts = together.replace("\n--- prompt", "--- prompt").split("--- prompt ")
    texts = [text[2:] for text in texts]  # behind the number
    alone = written(capsys, *options, "--prompt", PROMPTS[0])
    assert texts[0].rstrip("\n") == alone.rstrip("\n")
    assert texts[2] != texts[0]
    assert written(capsys, *options, "--prompt", PROMPTS[0], "--seed", 1) != alone


def test_the_cache_writes_what_the_whole_text_computed_again_each_time_does(run, capsys):
    settings = generate.argparse.Namespace(**generate.read_config(run)["settings"])
    structure, parameters = generate.read_model(generate.argparse.Namespace(run=run), settings)
    model = nnx.merge(structure, parameters)
    tokens = np.frombuffer(PROMPTS[1].encode(), np.uint8)
    padded = np.pad(tokens, (0, 30))
    forward = jax.jit(lambda model, tokens: model(tokens))
    for end in range(len(tokens), len(padded)):
        padded[end] = forward(model, jnp.asarray(padded[None], jnp.int32))[
            0, end - 1, :256
        ].argmax()
    text = written(capsys, run, "--prompt", PROMPTS[1], "--temperature", 0, "--max-bytes", 30)
    row = Row()
    for byte in padded:
        row.add(int(byte))
    row.finish()
    assert text == row.take() + "\n"


def test_memory_does_not_grow_with_the_text(run):
    settings = generate.argparse.Namespace(**generate.read_config(run)["settings"])
    structure, parameters = generate.read_model(generate.argparse.Namespace(run=run), settings)
    programs = compiled(structure, parameters, [b"a" * 60, b"b"], 10**6, Sampling(0.0), 0)
    assert programs.begin.memory_analysis().output_size_in_bytes < 10**5


def test_the_model_sees_as_far_back_as_its_training_did(run):
    settings = generate.argparse.Namespace(**generate.read_config(run)["settings"])
    structure, parameters = generate.read_model(generate.argparse.Namespace(run=run), settings)
    model = nnx.merge(structure, parameters)
    trained = nnx.merge(*new_model(settings))
    nnx.update(trained, parameters)
    reach = settings.layers * (CONTEXT - 1)  # of as many windows, one on the other
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, reach + 10)))
    changed = tokens.at[:, 0].add(1)
    within = slice(0, CONTEXT)
    np.testing.assert_allclose(model(tokens)[:, within], trained(tokens)[:, within], atol=1e-5)
    assert not np.allclose(model(tokens)[:, CONTEXT:], trained(tokens)[:, CONTEXT:], atol=1e-4)
    np.testing.assert_array_equal(model(tokens)[:, reach + 1 :], model(changed)[:, reach + 1 :])


def shares(sampling, p, draws=4000):
    logits = jnp.tile(jnp.log(jnp.array(p)), (draws, 1))
    drawn = choose(logits, jax.random.split(jax.random.key(0), draws), sampling)
    return np.bincount(drawn, minlength=len(p)) / draws


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
def test_bytes_are_drawn_as_often_as_they_should_be(sampling, expected):
    p = np.pad([0.4, 0.1, 0.3, 0.2], (0, 252), constant_values=1e-9)
    got = shares(sampling, p)
    deviation = np.sqrt(np.maximum(np.array(expected) * (1 - np.array(expected)) / 4000, 1e-9))
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


class Pieces(io.StringIO):
    """What stood there at each flush."""

    def flush(self):
        self.pieces = [*getattr(self, "pieces", []), self.getvalue()]


def test_text_is_written_as_it_comes_and_speed_is_told_on_stderr(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cab")))
    generate.main([str(run), "--max-bytes", "9"])
    assert out.pieces[0] == "a cab"
    assert len(out.pieces) == 1 + 9 + 1, "the prompt, each byte, and the end"
    errors = capsys.readouterr().err
    assert (
        errors.startswith("compiled in ")
        and errors.endswith(" bytes/s\n")
        and errors.count("\n") == 1
    )


def test_all_rows_end_at_their_stop_string(run, capsys, monkeypatch):
    logits = np.full(256, -1e9)
    logits[ord("x")] = 0
    monkeypatch.setattr(
        "scripts.gpt_run.generation.choose",
        lambda logits, keys, sampling: jnp.full(len(logits), ord("x")),
    )
    text = written(capsys, run, *several(PROMPTS[:2]), "--stop", "xxx", "--max-bytes", 99)
    assert text == f"--- prompt 1\n{PROMPTS[0]}\n--- prompt 2\n{PROMPTS[1]}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "a"], "RUN must be the folder of a run"),
        (["RUN", "--prompt", ""], "one --prompt is empty"),
        (["RUN", "--prompt", "a", "--attention", "quick"], "--attention: "),
        (["EMPTY", "--prompt", "a"], "has none yet"),
    ],
)
def test_an_error_is_one_line(run, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes((run / "config.json").read_bytes())
    known = dict(RUN=str(run), EMPTY=str(tmp_path / "empty"))
    with pytest.raises(SystemExit) as ended:
        generate.main([known.get(word, word) for word in arguments])
    text = str(ended.value.code)
    assert text.startswith("generate.py: error: ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    "option", [["--top-k", "0"], ["--top-p", "1.5"], ["--temperature", "-1"], ["--max-bytes", "0"]]
)
def test_an_option_out_of_range_is_named(option, capsys):
    with pytest.raises(SystemExit):
        generate.main(["run", "--prompt", "a", *option])
    assert option[0] in capsys.readouterr().err

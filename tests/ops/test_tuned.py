"""Launch settings from a file that `inline bench tune` wrote. `tests/bench/test_tuning.py` writes one."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import DEVICE, DTYPES, INLINE, configured, make_inputs, run

from inline_attention.ops import fused_mlp, gpu, tuned
from inline_attention.ops.fused import config, entry, short
from inline_attention.ops.fused.plan import make_plan, step_settings

PLACE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
CARD = tuned.card_of(PLACE)
OTHER = tuned.Card("A GPU", "8.0", 108, 163 * 1024)
STEPS = {"plain state 32": [[[16, 4, 1, 0]]]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder for files, and nothing read yet."""
    monkeypatch.setenv("INLINE_TUNED", str(tmp_path))
    tuned.tables_of.cache_clear()
    yield tmp_path
    tuned.tables_of.cache_clear()


def write(tables, *, path=None, card=CARD, **facts):
    path = path or tuned.place_of(card)
    path.write_text(json.dumps(dict(facts=tuned.facts_of(card) | facts, tables=tables, measured={})))
    return path


def steps_of(kernel, effort="plain", d=32):
    q = torch.empty(1, 9, 1, d, device=PLACE)
    plan = make_plan(q, q, q, None, (3, 3), 0)
    return tuple(step_settings(kernel, effort, plan, torch.float16).values())


def library_steps(kernel, effort="plain"):
    tokens, warps, stages, registers = config.STEPS[effort][kernel]
    limit = (registers,) if registers else ()
    return min(tokens, config.CONFIG.tokens), warps, stages, *limit


def test_a_kernel_is_launched_with_the_files_steps(folder, monkeypatch):
    """That kernel alone, in forward and backward."""
    launched = {}
    launch = gpu.launch

    def record(kernel, grid):
        def start(*args, **options):
            launched[kernel.__name__] = options["num_warps"], options.get("num_stages")
            return launch(kernel, grid)(*args, **options)

        return start

    monkeypatch.setattr(gpu, "launch", record)
    inputs = make_inputs(1, (3, 4), 0, 1, 32, DTYPES[-1])
    write({"steps": {"plain state 32": [[[16, 4, 1, 0]]], "plain grad 32": [[[16, 8, 4, 0]]]}})
    with configured(fused_tokens=0):
        run(*inputs, backend="triton", kind=INLINE)
    assert launched["state_kernel"] == (4, 1)
    assert launched["grad_kernel"] == (8, 4)
    assert launched["output_kernel"] == library_steps("output")[1:3]
    assert launched["grad_state_kernel"] == library_steps("grad_state")[1:3]


def test_steps_are_those_of_the_attention_and_the_heads(folder):
    write({"steps": STEPS | {"divide grad 64": [[[16, 2, 1, 0]]]}})
    assert steps_of("state") == steps_of("state", d=16) == (16, 4, 1)
    assert steps_of("state", "weighted") == library_steps("state", "weighted")
    assert steps_of("grad", "divide") == library_steps("grad", "divide")
    assert steps_of("grad", "divide", d=64) == (16, 4, 1), "twice the warps for twice the channels"
    assert steps_of("state", d=128) == (16, 8, 1), "as it was"


def test_records_say_where_the_settings_come_from(folder):
    write({"steps": {}})
    assert tuned.source_of(PLACE) == "the library's"
    tuned.tables_of.cache_clear()
    write({"normed": {"192 576": []}})
    assert tuned.source_of(PLACE) == "measured on this GPU"


def test_wins_of_the_file_take_the_place_of_the_librarys(folder, monkeypatch):
    """Entry by entry. An empty one says that the kernel never won."""
    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.H200)
    mlp, one_launch = [100, 200, [16, 16, 4, 1, 2]], [1, 9, 2, 3, [16, 16, 4, 1, 5]]
    write({"inference": {"192 768": [mlp], "64 256": []}, "normed": {"7 9": [mlp]}, "short": {"32 made": [one_launch]}})
    wins_of = fused_mlp.wins_of
    assert wins_of(PLACE, 192, 768, "inference") == ((100, 200, (16, 16, 4, 1, 2)),)
    assert wins_of(PLACE, 7, 9, "normed") == ((100, 200, (16, 16, 4, 1, 2)),)
    assert wins_of(PLACE, 64, 256, "inference") == ()
    (library,) = fused_mlp.WINS["projected"][gpu.H200, 64, 256]
    assert wins_of(PLACE, 64, 256, "projected") == ((library.least_rows, library.most_rows, tuple(library.tile)),)
    assert short.wins_of(PLACE, 32, True) == ((1, 9, 2, 3, (16, 16, 4, 1, 5)),)
    assert len(short.wins_of(PLACE, 32, False)) == len(short.WINS[gpu.H200, 32, False]) > 1


def test_an_unknown_gpu_has_no_wins_and_the_librarys_steps(folder, monkeypatch, recwarn):
    """The file of another GPU in the same folder is not looked at."""
    monkeypatch.setattr(gpu, "chip_of", lambda device: gpu.Chip(8, 6, 84))
    write({"steps": STEPS, "inference": {"192 768": [[1, 2, [16, 16, 4, 1, 1]]]}}, card=OTHER)
    assert tuned.place_of(OTHER).parent == folder
    assert steps_of("state") == library_steps("state")
    assert fused_mlp.wins_of(PLACE, 192, 768, "inference") == short.wins_of(PLACE, 32, True) == ()
    assert not recwarn.list


DAMAGED = "it is damaged, or no file of `inline bench tune`; remove it, and run `inline bench tune`"
FACTS = tuned.facts_of(CARD)


def with_tables(tables):
    return json.dumps(dict(facts=FACTS, tables=tables))


def with_facts(**facts):
    return json.dumps(dict(facts=FACTS | facts, tables={"steps": STEPS}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", DAMAGED),
        ("\x00\xff", DAMAGED),
        ("[" * 100_000, DAMAGED),
        ("[]", DAMAGED),
        ("{}", DAMAGED),
        (json.dumps(dict(facts=FACTS)), DAMAGED),
        (json.dumps(dict(facts=list(FACTS), tables={})), DAMAGED),
        (with_tables({"unknown": STEPS}), DAMAGED),
        (with_tables({"steps": []}), DAMAGED),
        (with_tables({"steps": {"plain state 32": [[16, 4, 1]]}}), DAMAGED),
        (with_tables({"steps": {"plain state 32": [[[16, 4]]]}}), DAMAGED),
        (with_tables({"steps": {"plain state 32": [[[16, 3, 1, 0]]]}}), DAMAGED),  # warps
        (with_tables({"steps": {"plain state 32": [[[16, 0, 1, 0]]]}}), DAMAGED),
        (with_tables({"steps": {"plain state 32": [[[16.0, 4, 1]]]}}), DAMAGED),
        (with_tables({"inference": {"192 768": [[1, [16, 16, 4, 1, 1]]]}}), DAMAGED),
        (with_tables({"inference": {"192 768": [[1, -2, [16, 16, 4, 1, 1]]]}}), DAMAGED),
        (with_facts(name="A GPU"), "it is of A GPU (name A GPU), and this is .*; remove it"),
        (with_facts(multiprocessors=7), r"it is of .* \(multiprocessors 7\), and this is .*; remove it"),
        (with_facts(triton="3.0.0"), r"measured with triton 3\.0\.0, and this is .*; run `inline bench tune`"),
        (with_facts(**{"inline-attention": "0.1"}), r"with inline-attention 0\.1, and this is .*; run `inline"),
        (with_facts(format=0), "with format 0, and this is 1; run `inline bench tune`"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_once(text, message, folder):
    path = tuned.place_of(CARD)
    path.write_text(text, encoding="utf-8")
    pattern = message.replace("(name A GPU)", r"\(name A GPU\)")
    with pytest.warns(UserWarning, match=rf"settings in {path} are not used, because .*{pattern}"):
        assert steps_of("state") == library_steps("state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steps_of("output") == library_steps("output")
        assert tuned.digest(PLACE) == ""


def test_a_file_that_cannot_be_opened_is_named(folder):
    tuned.place_of(CARD).mkdir()
    with pytest.warns(UserWarning, match="it cannot be read: Is a directory"):
        assert steps_of("state") == library_steps("state")


def test_a_file_can_be_named(tmp_path, folder, monkeypatch):
    path = tmp_path / "passed on.json"
    monkeypatch.setenv("INLINE_TUNED", str(path))
    with pytest.warns(UserWarning, match="because it does not exist; correct INLINE_TUNED"):
        assert steps_of("state") == library_steps("state")
    write({"steps": STEPS}, path=path)
    tuned.tables_of.cache_clear()
    assert steps_of("state") == (16, 4, 1)


def test_the_folder_is_in_the_users_cache(monkeypatch):
    monkeypatch.delenv("INLINE_TUNED")
    monkeypatch.setenv("HOME", "/home/somebody")
    for cache, expected in ((None, "/home/somebody/.cache"), ("", "/home/somebody/.cache"), ("/cache", "/cache")):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if cache is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert tuned.place_of(OTHER) == Path(expected, "inline_attention", "A-GPU-8.0-108-163.json")
    names = {tuned.place_of(card) for card in (OTHER, OTHER._replace(multiprocessors=7), OTHER._replace(name="A/../B"))}
    assert len(names) == 3
    assert all(path.parent == Path("/cache/inline_attention") for path in names)


def test_a_process_reads_the_file_once(folder):
    write({"steps": STEPS})
    assert steps_of("state") == (16, 4, 1)
    write({"steps": {"plain state 32": [[[16, 2, 2, 0]]]}})
    assert steps_of("state") == (16, 4, 1)


def test_compiled_code_asks_once_and_checks_no_file(folder):
    """As it is with the library's tables."""
    write({"inference": {"192 768": [[1, 2, [16, 16, 4, 1, 1]], [3, 4, [16, 16, 4, 1, 1]]]}})

    def count(x):
        return x + len(fused_mlp.wins_of(x.device, 192, 768, "inference"))

    torch._dynamo.reset()
    compiled = torch.compile(count, backend="eager", fullgraph=True)
    x = torch.zeros((), device=PLACE)
    assert compiled(x) == 2
    tuned.tables_of.cache_clear()
    write({})
    assert compiled(x) == 2
    (guards,) = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(count.__code__)
    assert not {"tables_of", "environ", "_tried"} & set(re.findall(r"\w+", str(guards.guard_manager)))


def test_the_operator_tells_the_compilers_cache_which_steps_it_takes(folder, monkeypatch):
    seen = []
    forward = entry.forward_op
    monkeypatch.setattr(entry, "forward_op", lambda *args: seen.append(args[-1]) or forward(*args))
    inputs = make_inputs(1, (3, 4), 0, 1, 16, DTYPES[-1])
    for tables in ({}, {"inference": {}}, {"steps": STEPS}, {"steps": {"plain state 32": [[[16, 2, 2, 0]]]}}):
        write(tables)
        tuned.tables_of.cache_clear()
        run(*inputs, backend="triton")
    assert seen[:2] == ["", ""]
    assert len({*seen}) == 3


def test_trying_is_over_afterwards(folder):
    write({"steps": STEPS})
    with tuned.trying("steps", {"plain state 32": (((16, 2, 2, 0),),)}):
        assert steps_of("state") == (16, 2, 2)
        with tuned.trying("steps", {"plain grad 32": (((16, 1, 1, 0),),)}):
            assert (steps_of("state"), steps_of("grad")) == ((16, 2, 2), (16, 1, 1))
        assert steps_of("grad") == library_steps("grad")
    assert steps_of("state") == (16, 4, 1)


def test_nothing_is_read_where_no_kernel_runs(monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRETED", False)
    assert tuned.card_of(torch.device("cpu")) is tuned.card_of(torch.device("meta")) is None

"""A policy's folder that cannot be played or trained ends a run before its first stage, and says why."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tasks.model import export_folder, load_policy, outline
from tasks.plan import RunSettings, model_folders
from tasks.plan.model_size import of_folder
from tasks.store import DataError
from tests import shipped
from tests.tiny import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
MINE = "kind: pretrained\nprompt: tiny\npretrained: {folder: models/mine}\nlora: {rank: 0}\n"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message.') }}{% endif %}"


def _run(root: Path, generator: str = "plain", **prompt: str) -> RunSettings:
    """The house with the model of `models/mine`, and its folder, which is whole."""
    for name in ("requirements", "conf"):
        shutil.copytree(ROOT / name, root / name)
    text = MINE.replace("prompt: tiny", f"prompt: {prompt['prompt']}") if prompt else MINE
    (root / "conf/model/mine.yaml").write_text(text)
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, root / "models/mine")
    changes: dict[str, Any] = {"systems": ("base", "search_r1_grpo"), "seeds": (0,), "generator": generator}
    return RunSettings(root, replace(shipped.settings(), model="mine", **changes))


def _weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "model.safetensors"
        weights = load_file(file)
        change(weights)
        save_file(weights, file, {"format": "pt"})

    return spoil


def _config(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return spoil


def _file(name: str, content: bytes | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return spoil


def _half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _larger_tokenizer(folder: Path) -> None:
    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.add_tokens([f"<more {i}>" for i in range(100)])
    tokenizer.save_pretrained(folder)


LOOPS = b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_file("config.json", None), "no model configuration found"),
        (_file("config.json", b"{"), r"config\.json: line 1: not JSON"),
        (_file("model.safetensors", None), "no safetensors weights found"),
        (_half, "cannot load configuration and weights"),
        (_file("tokenizer.json", None), "no tokenizer found"),
        (_weights(lambda w: w.pop(LAYER)), rf"1 weights of Qwen2ForCausalLM are in no file .* {LAYER}"),
        (_weights(lambda w: w.update({LAYER: w[LAYER][1:]})), "cannot load configuration and weights"),
        (_config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "weights of Qwen2ForCausalLM are in no f"),
        (_config(model_type="nothing_known"), "cannot load the tokenizer|cannot load configuration"),
        (_config(use_sliding_window=True, sliding_window=8, max_window_layers=0), "sliding_window=8: the plain gener"),
        (_larger_tokenizer, r"the tokenizer has token ids up to \d+, and the model embeds ids below \d+"),
        (_file("chat_template.jinja", NO_SYSTEM.encode()), r"base.yaml: prompt: .* of system and user: no"),
        (_file("chat_template.jinja", b"{{ messages | nothing }}"), "does not take messages of system and user: "),
        (_file("chat_template.jinja", b"Hello."), "leaves out the user's message, so the model would not see the que"),
        (_file("chat_template.jinja", b"{% for"), "does not take messages of system and user: "),
        (_file("chat_template.jinja", LOOPS), "does not take messages of system and user: it takes longer than 2 s"),
        (_file("chat_template.jinja", b"{{ 'a' * 10 ** 10 }}"), "does not take messages .*MemoryError"),
        (_file("chat_template.jinja", b"{{ messages[0].content.ljust(10 ** 10) }}"), "does not take .*MemoryError"),
        (_file("chat_template.jinja", b"{{ 'a' * 10 ** 7 }}"), "makes 10,000,000 characters of a prompt, expected at "),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole(
    tmp_path: Path, spoil: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folders, "MAX_SECONDS", 2.0)
    run = _run(tmp_path, prompt="chatty")
    tiny = (ROOT / "conf/prompt/tiny.yaml").read_text()
    (tmp_path / "conf/prompt/chatty.yaml").write_text(tiny.replace("system: null", "system: Search first."))
    model_folders.check(run)
    spoil(tmp_path / "models/mine")
    with pytest.raises(ValueError, match=f"models/mine.*{message}|{message}") as caught:
        model_folders.check(run)
    assert "models/mine" in str(caught.value)
    assert "\n" not in str(caught.value)


FOREIGN = {
    "model_type": "foreign",
    "auto_map": {key: f"foreign.{key}" for key in ("AutoConfig", "AutoModelForCausalLM")},
}
FOREIGN_TOKENIZER = {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Tokenizer", None]}}


def _with_code(folder: Path) -> None:
    """A Python file in a model folder that leaves a trace beside it when it is imported."""
    (folder / "foreign.py").write_text(f"open({str(folder / 'has_run')!r}, 'w')\n")


def test_code_of_a_model_folder_is_never_run_and_the_error_says_why(tmp_path: Path) -> None:
    run = _run(tmp_path)
    folder = tmp_path / "models/mine"
    _with_code(folder)
    _config(**FOREIGN)(folder)
    why = (
        r"it needs Python code that comes with the model \(`auto_map`\), which is never run here, because such code can"
    )
    with pytest.raises(DataError, match=rf"models/mine: transformers cannot load configuration and weights: {why}"):
        model_folders.check(run)
    with pytest.raises(DataError, match=why):
        load_policy(folder)
    assert not (folder / "has_run").exists()


def test_code_beside_a_model_that_transformers_knows_is_not_used(tmp_path: Path) -> None:
    run = _run(tmp_path)
    folder = tmp_path / "models/mine"
    _with_code(folder)
    _config(auto_map=FOREIGN["auto_map"])(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | FOREIGN_TOKENIZER))
    model_folders.check(run)
    assert not (folder / "has_run").exists()


def test_a_model_without_a_chat_template_is_said_and_what_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path)
    model_folders.check(run)
    said = "its tokenizer has no chat template, so prompts are plain text: the system message, a blank line, and the"
    assert said in capsys.readouterr().out
    _file("chat_template.jinja", b"{% for m in messages %}{{ m['content'] }}{% endfor %}")(tmp_path / "models/mine")
    model_folders.check(run)
    assert "chat template" not in capsys.readouterr().out


def test_a_window_is_left_to_another_generator(tmp_path: Path) -> None:
    run = _run(tmp_path, generator="vllm")
    _config(use_sliding_window=True, sliding_window=8, max_window_layers=0)(tmp_path / "models/mine")
    model_folders.check(run)


def test_a_prompt_that_leaves_no_room_for_a_question_is_found_before_anything_is_taught(tmp_path: Path) -> None:
    run = _run(tmp_path, prompt="null")
    with pytest.raises(
        DataError, match=r"base.yaml: prompt: a question of one word: its prompt has \d+ tokens, the bud"
    ):
        model_folders.check(run)


def _other(kind: str, vocab: int, **values: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocab, **values)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_model_of_another_architecture_is_measured(tmp_path: Path) -> None:
    """GPT-2 has other names for its sizes, no groups of heads, and positions that are learned."""
    tokenizer = make_tokenizer()
    model = _other("GPT2", len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=64)
    export_folder(model, tokenizer, tmp_path)
    size = of_folder(tmp_path)
    assert (size.hidden, size.intermediate, size.layers, size.kv_heads, size.positions) == (16, 64, 2, 2, 64)
    assert size.num_weights == sum(p.numel() for p in model.parameters())
    load_policy(tmp_path)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Granite", SIZES | {"logits_scaling": 4.0, "initializer_range": 0.5}, "Granite.*: its logits are not head"),
        ("Gemma2", SIZES | {"head_dim": 8, "final_logit_softcapping": 0.1, "initializer_range": 0.5}, "not head"),
        ("Bert", {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "Bert.*: its logits"),
    ],
)
def test_logits_that_are_not_those_of_the_decoder(tmp_path: Path, kind: str, values: Any, message: str) -> None:
    tokenizer = make_tokenizer()
    export_folder(_other(kind, len(tokenizer), intermediate_size=16, **values), tokenizer, tmp_path)
    with pytest.raises(DataError, match=message):
        load_policy(tmp_path)


def test_logits_that_are_no_numbers(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    export_folder(make_model(tokenizer), tokenizer, tmp_path)
    _weights(lambda w: w[LAYER].fill_(torch.nan))(tmp_path)
    with pytest.raises(DataError, match="its logits are not finite numbers"):
        load_policy(tmp_path)


def test_weights_that_the_model_has_no_place_for_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path)
    _config(num_hidden_layers=1, layer_types=["full_attention"])(tmp_path / "models/mine")
    model_folders.check(run)
    assert "weights in its files have no place in Qwen2ForCausalLM, such as model.layers.1." in capsys.readouterr().err


def test_a_folder_is_outlined_without_its_weights(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    export_folder(model, tokenizer, tmp_path)
    found, *_ = outline(tmp_path)
    assert {name: (p.shape, p.device.type) for name, p in found.named_parameters()} == {
        name: (p.shape, "meta") for name, p in model.named_parameters()
    }

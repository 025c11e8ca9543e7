"""The engine's readers on files that a stranger made: whatever the bytes, they read, or refuse the file by its name.

Nothing outside the folder is opened, nothing waits for ever, and no other error comes out. What is refused is not only what
a disk spoils (test_checkpoint.py): here checksums are right, and the contents are not.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import save_file

from ftkit.engine.checkpoint.loading import check_checkpoint, load_checkpoint
from ftkit.engine.checkpoint.manifest import MANIFEST, OPTIMIZER_PARTS, PARTS, read_manifest
from ftkit.engine.checkpoint.reader import CheckedFile, PieceBuffers
from ftkit.engine.checkpoint.safetensors import DTYPES, TensorFile, create_file
from ftkit.engine.checkpoint.saving import save_checkpoint
from ftkit.engine.checkpoint.sealed import (
    CONTENTS,
    BrokenCheckpoint,
    check_contents,
    checksum,
    read_sealed,
    write_contents,
    write_sealed,
)
from ftkit.engine.optim.adamw import ShardedAdamW
from ftkit.engine.optim.sgd import ShardedSGD
from ftkit.errors import UserError
from ftkit.spec.strategy import Strategy
from tests.engine.trajectory import shard_model
from tests.hostile import JSON, LEAVES, NUMBERS, examples, fuzz, mutated, opens_only, told

# --- safetensors


def read_all(path: Path) -> None:
    """Read every tensor of a file; whatever is accepted must lie in it."""
    with TensorFile(path) as file:
        size = path.stat().st_size
        for name, entry in file.entries.items():
            assert 0 <= entry.offset <= size
            if entry.dtype is not None:
                assert entry.offset + entry.numel * entry.dtype.itemsize <= size
                file.read(name, 0, torch.empty(entry.numel, dtype=entry.dtype))


def with_header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.safetensors"
    tensors = {"a.b": torch.arange(6.0).view(2, 3), "c": torch.ones(5, dtype=torch.bfloat16), "d": torch.zeros(0)}
    save_file(tensors, path, {"format": "pt"})
    read_all(path)
    return path.read_bytes()


@examples(80, 5000)
def test_tensor_files_of_any_bytes(count: int, good_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    some = st.one_of(st.binary(max_size=64), mutated(good_file), st.binary(max_size=64).map(with_header))

    def check(data: bytes) -> None:
        path.write_bytes(data)
        told(path, lambda: read_all(path))

    fuzz(count, some, check)


@examples(50, 3000)
def test_tensor_files_with_any_header(count: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sizes = st.one_of(st.integers(0, 16), NUMBERS)
    entry = st.fixed_dictionaries(
        {"dtype": st.sampled_from([*DTYPES, "F8_E4M3", None, 3]), "shape": st.lists(sizes, max_size=3) | JSON},
        optional={"data_offsets": st.lists(sizes, min_size=2, max_size=2) | JSON},
    )
    header = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", "\ud800"]), entry | JSON, max_size=3) | JSON

    def check(drawn: tuple[Any, int]) -> None:
        path.write_bytes(with_header(json.dumps(drawn[0]).encode(), bytes(drawn[1])))
        told(path, lambda: read_all(path))

    fuzz(count, st.tuples(header, st.integers(0, 64)), check)


ONE = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ('{"a":' + ONE + ',"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "overlap"),
        ('{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "not counts"),
        ('{"a":{"dtype":"F32","shape":[2,0],"data_offsets":[8,0]}}', "does not fill"),
        ('{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', "does not fill"),
        ('{"a":{"dtype":"F32","shape":[2305843009213693950],"data_offsets":[0,9223372036854775800]}}', "cut short"),
        ("[" * 100_000, "not valid"),
        ("7" * 5000, "not valid"),
    ],
)
def test_hostile_headers(header: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header(header.encode(), bytes(12 if "[4,12]" in header else 8)))
    with pytest.raises(UserError, match=f"{path}.*{says}"):
        TensorFile(path)


@pytest.mark.parametrize("length", [0, 1, 9, 2**31, 2**63, 2**64 - 1])
def test_hostile_lengths(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match=f"{path}: not a safetensors file"):
        TensorFile(path)


def odd_things(folder: Path) -> dict[str, Path]:
    """Return what may lie where a file should: to open some of it waits for ever, or never ends."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder / "loop")
    return {name: folder / name for name in ("pipe", "folder", "zero", "loop", "missing")}


def test_a_tensor_file_is_a_file(tmp_path: Path) -> None:
    for path in odd_things(tmp_path).values():
        with pytest.raises(UserError, match=str(path)):
            TensorFile(path)


# --- sealed files and lists


@examples(80, 5000)
def test_sealed_files_of_any_bytes(count: int, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed(path, {"files": {"a": [1, "0" * 16]}, "format": 2})
    good = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        assert told(path, lambda: read_sealed(path)) is not None or data == good

    fuzz(count, st.binary(max_size=64) | mutated(good), check)


def test_what_a_stranger_sealed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for rest in (b'"a":' + b"[" * 100_000, b'"a":1', b"\xff}", b'"a":' + b"7" * 5000 + b"}"):
        path.write_bytes(b'{"checksum":"' + checksum(rest).encode() + b'",' + rest)
        with pytest.raises(BrokenCheckpoint, match=f"{path}: not readable"):
            read_sealed(path)
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole: to read it would take all memory
    with pytest.raises(BrokenCheckpoint, match=f"{path}: 1099511627776 bytes"):
        read_sealed(path)
    for odd in odd_things(tmp_path).values():
        with pytest.raises(BrokenCheckpoint, match=str(odd)):
            read_sealed(odd)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A folder with a list, and beside it what must not be read."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    (folder / "sub" / "b").write_text("b")
    (tmp_path / "secret").write_text("secret")
    write_contents(folder)
    assert check_contents(folder) == ["a.json", "sub/b"]
    return folder


BAD_NAMES = ["/etc/passwd", "../secret", "sub/../../secret", "sub//b", "", "..", "a\0.json", "\ud800", "x" * 5000]
LEADING_ELSEWHERE = ["link", "door/secret", "loop", "pipe", "sub", "zero"]


@pytest.mark.parametrize("name", [*BAD_NAMES, *LEADING_ELSEWHERE], ids=lambda name: ascii(name)[:30])
def test_names_that_lead_elsewhere_or_to_no_file(name: str, listed: Path) -> None:
    for thing, target in (("link", "../secret"), ("door", ".."), ("loop", "loop"), ("zero", "/dev/zero")):
        (listed / thing).symlink_to(target)
    os.mkfifo(listed / "pipe")
    for size in (0, 6):
        write_sealed(listed / CONTENTS, {"files": {name: [size, "0" * 16]}})
        with opens_only(listed), pytest.raises(BrokenCheckpoint, match=str(listed)):
            check_contents(listed)


def test_lists_that_are_links_are_not_followed(listed: Path) -> None:
    (listed / CONTENTS).rename(listed.parent / CONTENTS)
    (listed / CONTENTS).symlink_to(listed.parent / CONTENTS)
    with opens_only(listed), pytest.raises(BrokenCheckpoint, match=r"contents\.json: a link that leads out of its folder"):
        check_contents(listed)
    (listed / "inner.json").write_bytes((listed.parent / CONTENTS).read_bytes())
    (listed / CONTENTS).unlink()
    (listed / CONTENTS).symlink_to("inner.json")
    assert check_contents(listed) == ["a.json", "sub/b"], "within the folder it may lie where it likes"


@examples(40, 2000)
def test_lists_of_anything(count: int, listed: Path) -> None:
    entries = st.lists(st.integers(0, 4) | st.text("0123456789abcdef", min_size=16, max_size=16) | LEAVES, max_size=3)
    names = st.sampled_from(["a.json", "sub/b", "sub", "../secret"]) | st.text(max_size=5)
    content = st.fixed_dictionaries({"files": st.dictionaries(names, entries | JSON, max_size=3) | JSON}) | st.just({})

    def check(drawn: dict[str, Any]) -> None:
        write_sealed(listed / CONTENTS, drawn)
        with opens_only(listed):
            told(listed, lambda: check_contents(listed))

    fuzz(count, content, check)


# --- pieces


@examples(100, 3000)
def test_pieces_of_anything(count: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    create_file(path, [("a", (5904,), torch.uint8)])
    ends = st.sampled_from([0, 4096, 8192, 10_000, 2**23, 2**63]) | NUMBERS
    pieces = st.lists(st.tuples(ends, ends, st.text(max_size=16) | LEAVES).map(list) | LEAVES, max_size=4) | LEAVES

    def check(drawn: tuple[Any, Any]) -> None:
        def read() -> None:
            with PieceBuffers() as buffers, CheckedFile(path, *drawn, buffers) as file:
                buffers.expect((file, number) for number in range(len(file.pieces)))
                file.read("a", 0, torch.empty(5904))

        told(path, read)

    fuzz(count, st.tuples(st.just(10_000) | NUMBERS, pieces), check)


# --- a whole checkpoint, whose manifest is a stranger's


def make(layers: int = 1, width: int = 16, family: str = "llama", optimizer: type = ShardedAdamW) -> tuple[Any, Any]:
    """Return a sharded model of some thousand parameters and its optimizer with two groups."""
    common = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes))
    else:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common, n_embd=width, n_layer=layers, n_head=2, n_positions=32)
        )
    units = shard_model(model, Strategy.of(stage=3))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return units, optimizer(units, [{"params": matrices}, {"params": vectors, "lr": 5e-4}], lr=1e-3)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "good"
    save_checkpoint(folder, *make(), extra={"cursor": 7})
    check_checkpoint(folder)
    assert load_checkpoint(folder, *make()) == {"cursor": 7}
    return folder


@pytest.fixture
def spoiled(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "spoiled")


PLACES = [*((part,) for part in (*PARTS, "format", "optimizer")), *(("optimizer", part) for part in OPTIMIZER_PARTS)]


def changed(manifest: dict[str, Any], place: tuple[str, ...], key: int | None, value: Any) -> dict[str, Any]:
    """Return a manifest with a value put in a place, or (with `key`) in some place below it."""
    new = json.loads(json.dumps(manifest))
    holder, last = new, place[-1]
    for step in place[:-1]:
        holder = holder[step]
    while key is not None and isinstance(holder[last], (dict, list)) and holder[last]:
        below = holder[last]
        names = sorted(below) if isinstance(below, dict) else range(len(below))
        holder, last, key = below, names[key % len(names)], key // len(names) or None
    holder[last] = value
    return new


@examples(80, 2500)
def test_manifests_of_anything(count: int, good: Path, spoiled: Path) -> None:
    manifest = {key: value for key, value in read_sealed(good / MANIFEST).items() if key != "checksum"}
    units, optimizer = make()
    drawn = st.tuples(st.sampled_from(PLACES), st.none() | st.integers(0, 10**6), LEAVES | JSON)

    def check(example: tuple[Any, Any, Any]) -> None:
        write_sealed(spoiled / MANIFEST, changed(manifest, *example))
        with opens_only(spoiled):
            refused = told(spoiled, lambda: check_checkpoint(spoiled))
            loaded = told(spoiled, lambda: load_checkpoint(spoiled, units, optimizer))
        assert not refused or loaded, f"what the check refuses is not loaded: {refused}"

    fuzz(count, drawn, check)


OF_NO_LINE = ["../x.safetensors", "a/b.safetensors"]


@pytest.mark.parametrize("name", [*BAD_NAMES, *OF_NO_LINE], ids=lambda name: ascii(name)[:30])
def test_names_in_a_manifest(name: str, good: Path, spoiled: Path) -> None:
    manifest = read_sealed(good / MANIFEST)
    entry = next(iter(manifest["files"].values()))
    write_sealed(spoiled / MANIFEST, {**manifest, "files": {name: entry}})
    with opens_only(spoiled), pytest.raises(BrokenCheckpoint, match=f"{spoiled / MANIFEST}"):
        read_manifest(spoiled)


def test_a_line_that_is_a_link_out_of_the_folder_or_no_file(spoiled: Path, tmp_path: Path) -> None:
    victim = sorted(spoiled.glob("*.exp_avg.safetensors"))[0]
    victim.rename(tmp_path / "elsewhere")
    for make_it in (lambda: victim.symlink_to(tmp_path / "elsewhere"), lambda: os.mkfifo(victim), victim.mkdir):
        make_it()
        for read in (lambda: check_checkpoint(spoiled), lambda: load_checkpoint(spoiled, *make())):
            with opens_only(spoiled), pytest.raises(BrokenCheckpoint, match=f"{victim}: (a link|is no file)"):
                read()
        victim.rmdir() if victim.is_dir() and not victim.is_symlink() else victim.unlink()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"width": 32}, "has shape"),
        ({"layers": 2}, "has no optimizer state of model.layers.1"),
        ({"family": "gpt2"}, "has no optimizer state of transformer"),
        ({"optimizer": ShardedSGD}, "saved from ShardedAdamW"),
    ],
)
def test_another_model_or_optimizer_is_refused(other: dict[str, Any], says: str, good: Path) -> None:
    with pytest.raises(UserError, match=f"{good}.*{says}"):
        load_checkpoint(good, *make(**other))


def test_a_shorter_model_does_not_go_on_with_a_part_of_a_longer_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "two", *make(layers=2))
    units, optimizer = make()
    with pytest.raises(UserError, match=r"has optimizer state of model\.layers\.1.*does not train"):
        load_checkpoint(tmp_path / "two", units, optimizer)
    with pytest.raises(UserError, match=r"holds 'model\.layers\.1.*another model"):
        load_checkpoint(tmp_path / "two", units)

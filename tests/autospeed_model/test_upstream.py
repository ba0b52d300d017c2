import os
import sys
import types
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autospeed_model.errors import UserError
from autospeed_model.network import AutoSpeed
from autospeed_model.packed import VARIANTS
from autospeed_model.upstream import load_upstream, load_upstream_tensors, read_tensors, upstream_names


def filled(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """A tensor per name, different for each."""
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tensors[name] = torch.rand(shape, generator=generator).to(torch.int64 if not shape else torch.float32)
    return tensors


def module_tree(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these tensors under these names, of a class that the reader cannot import."""
    stranger = types.ModuleType("upstream_project")
    stranger.Block = type("Block", (nn.Module,), {"__module__": "upstream_project"})  # type: ignore[attr-defined]
    sys.modules["upstream_project"] = stranger
    root: nn.Module = stranger.Block()
    for name, value in tensors.items():
        node = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in node._modules:
                node.add_module(part, stranger.Block())
            node = node._modules[part]  # type: ignore[assignment]
        if "running" in leaf or "num_batches" in leaf:
            node.register_buffer(leaf, value)
        else:
            node.register_parameter(leaf, nn.Parameter(value))
    return root


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_upstream_tensor_has_its_place_and_every_place_its_tensor(variant: str, upstream: dict[str, Any]) -> None:
    with torch.device("meta"):
        network = AutoSpeed(*VARIANTS[variant])
    names = upstream_names(network)
    assert set(names) == set(network.state_dict())
    assert set(names.values()) == set(upstream[f"{variant}/n"]["tensors"]) - {"head.dfl.conv.weight"}


def test_a_pickled_half_precision_module_is_read_without_its_classes(tmp_path: Path, upstream: dict[str, Any]) -> None:
    tensors = filled(upstream["autospeed/n"]["tensors"])
    path = tmp_path / "best.pt"
    torch.save({"epoch": 3, "model": module_tree(tensors).half()}, path)
    del sys.modules["upstream_project"]

    network = AutoSpeed(640, 640)
    load_upstream(network, path)

    state = network.state_dict()
    for ours, theirs in upstream_names(network).items():
        expected = tensors[theirs]
        if ours.endswith("spread.weight"):
            expected = expected[:, :, 1]
        if expected.is_floating_point():
            expected = expected.half().float()
        assert torch.equal(state[ours], expected), ours


def test_a_plain_state_dict_is_read_as_well(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "model": {"a.weight": torch.ones(2), "note": "text"}}, tmp_path / "state.pt")
    assert read_tensors(tmp_path / "state.pt").keys() == {"a.weight"}


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("executed",)


def test_pickled_code_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"weight": torch.ones(2)}, "extra": [Evil()]}, "evil.pt")
    assert torch.equal(read_tensors(Path("evil.pt"))["weight"], torch.ones(2))
    assert not Path("executed").exists()


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("script/data.pkl", b"")
        archive.writestr("script/constants.pkl", b"")
    with pytest.raises(UserError, match="TorchScript"):
        read_tensors(tmp_path / "script.pt")


@pytest.mark.parametrize("content", [b"", b"text"])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not a file of torch\.save"):
        read_tensors(path)


def test_a_checkpoint_without_tensors_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 1}, tmp_path / "empty.pt")
    with pytest.raises(UserError, match="holds no tensors"):
        read_tensors(tmp_path / "empty.pt")
    with pytest.raises(UserError, match="no such file"):
        read_tensors(tmp_path / "none.pt")


def test_tensors_of_another_variant_or_another_network_are_refused(upstream: dict[str, Any]) -> None:
    tensors = filled(upstream["autospeed/n"]["tensors"])
    with pytest.raises(UserError, match=r"net\.p2\.1\.exp0\.weight' is .*the network needs"):
        load_upstream_tensors(AutoSpeed(512, 1024), tensors)
    network = AutoSpeed(640, 640)
    with pytest.raises(UserError, match="has tensors that this network does not: extra"):
        load_upstream_tensors(network, {**tensors, "extra": torch.ones(1)})
    del tensors["net.p1.conv.weight"]
    with pytest.raises(UserError, match=r"has no tensor 'net\.p1\.conv\.weight'; is it of size n"):
        load_upstream_tensors(network, tensors)

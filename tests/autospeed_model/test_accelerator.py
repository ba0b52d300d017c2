import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autospeed_model import accelerator
from autospeed_model.accelerator import (
    NODE_CACHE,
    SHARED_CACHE,
    SWITCHES,
    TUNED_MIOPEN,
    node_cache,
    prepare_process,
    shared_cache,
)
from autospeed_model.errors import UserError


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return {NODE_CACHE: str(tmp_path / "cache"), **more}


def test_switches_are_set_but_what_is_set_already_wins(tmp_path: Path) -> None:
    found = environment(tmp_path, PYTORCH_MIOPEN_SUGGEST_NHWC="0")
    prepare_process(found)
    assert found["PYTORCH_MIOPEN_SUGGEST_NHWC"] == "0"
    assert all(found[name] == value for name, value in SWITCHES.items() if name != "PYTORCH_MIOPEN_SUGGEST_NHWC")


def test_the_allocator_of_nvidias_gpus_is_set_only_there_and_not_over_a_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    files = [tmp_path / "version", tmp_path / "nvidiactl"]
    monkeypatch.setattr(accelerator, "NVIDIA_DRIVER", tuple(map(str, files)))
    without = environment(tmp_path)
    prepare_process(without)
    assert name not in without
    for file in files:
        file.touch()
        for more, expected in (
            ({}, "expandable_segments:True"),
            ({name: "backend:native"}, "backend:native"),
            ({name: ""}, ""),
            ({"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        ):
            found = environment(tmp_path, **more)
            prepare_process(found)
            assert found.get(name) == expected
        file.unlink()


def test_the_allocators_settings_count_though_torch_was_imported_before() -> None:
    code = "import os, sys, torch; os.environ['PYTORCH_CUDA_ALLOC_CONF'] = sys.argv[1]; "
    code += (
        "read = getattr(torch._C, '_accelerator_getAllocatorSettings', None); print(read() if read else sys.argv[1])"
    )
    wanted = accelerator.NVIDIA_SWITCHES["PYTORCH_CUDA_ALLOC_CONF"]
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    found = subprocess.run([sys.executable, "-c", code, wanted], env=clean, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == wanted


def test_compiled_code_lies_in_a_private_folder_of_the_node_by_release_of_torch(tmp_path: Path) -> None:
    found = {"TMPDIR": str(tmp_path)}
    prepare_process(found)
    folder = Path(found["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_dir() and folder.name.startswith("torch-")
    assert folder.parent == tmp_path / f"autospeed-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        node_cache(environment(tmp_path))


def test_folders_of_compiled_code_that_others_can_write_to_are_refused(tmp_path: Path) -> None:
    found = environment(tmp_path, **{SHARED_CACHE: str(tmp_path / "above" / "shared")})
    node, shared = node_cache(found), shared_cache(found)
    assert shared is not None and shared.stat().st_mode & 0o077 == 0
    for mode, where in ((0o777, node), (0o770, node.parent), (0o1777, shared), (0o775, shared), (0o777, shared.parent)):
        before = where.stat().st_mode
        where.chmod(mode)
        with pytest.raises(UserError, match=re.escape(f"{where}: ") + f".*mode {mode:o}"):
            shared_cache(found) if where in (shared, shared.parent) else node_cache(found)
        where.chmod(before)
    node_cache(found)
    shared_cache(found)


def test_a_process_begins_without_a_shared_folder_but_not_with_one_that_all_can_write_to(tmp_path: Path) -> None:
    found = environment(tmp_path, **{SHARED_CACHE: str(tmp_path / "open")})
    prepare_process(found)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    with pytest.raises(UserError, match=f"mode 1777.*set {SHARED_CACHE}"):
        prepare_process(found)


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_users_own_folder_of_pytorchs_caches_stays_unless_others_could_plant_code_there(
    name: str, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    found = environment(tmp_path, **{name: str(own)})
    prepare_process(found)
    assert found[name] == str(own) and own.stat().st_mode & 0o077 == 0
    own.chmod(0o775)
    with pytest.raises(UserError, match=re.escape(f"{own}: ") + f".*mode 775.*{name}.*or unset it"):
        prepare_process(found)
    found[name] = str(tmp_path / "a file" / "own")  # cannot be made: for PyTorch to say if it compiles anything
    (tmp_path / "a file").touch()
    prepare_process(found)


def test_an_empty_name_of_pytorchs_cache_counts_as_none(tmp_path: Path) -> None:
    found = environment(tmp_path, TORCHINDUCTOR_CACHE_DIR="", TRITON_CACHE_DIR="")
    prepare_process(found)
    assert Path(found["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path / "cache"


def test_what_pytorch_adds_below_its_cache_is_no_matter_for_the_next_trial(tmp_path: Path) -> None:
    found = environment(tmp_path)
    prepare_process(found)
    added = Path(found["TORCHINDUCTOR_CACHE_DIR"]) / "triton" / "0"
    added.mkdir(parents=True)
    added.chmod(0o775)  # as PyTorch makes it where groups are trusted
    found["TRITON_CACHE_DIR"] = str(added)
    prepare_process(found)


def test_each_worker_begins_with_a_copy_of_the_tuned_database(tmp_path: Path) -> None:
    tuned, own = tmp_path / "tuned", tmp_path / "own"
    tuned.mkdir()
    (tuned / "gfx942.udb.txt").write_text("tuned")
    own.mkdir()
    (own / "gfx90a.udb.txt").write_text("mine")
    found = environment(tmp_path, **{TUNED_MIOPEN: str(tuned), "MIOPEN_USER_DB_PATH": str(own)})
    prepare_process(found)
    assert {file.name: file.read_text() for file in own.iterdir()} == {
        "gfx942.udb.txt": "tuned",
        "gfx90a.udb.txt": "mine",
    }
    (own / "gfx942.udb.txt").write_text("learned more")
    prepare_process(found)
    assert (own / "gfx942.udb.txt").read_text() == "learned more"
    assert (tuned / "gfx942.udb.txt").read_text() == "tuned"


def test_a_tuned_database_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tune_miopen"):
        prepare_process(environment(tmp_path, **{TUNED_MIOPEN: str(tmp_path / "none")}))


def test_preparing_a_process_does_not_import_torch() -> None:
    code = "import sys, autospeed_model.accelerator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Study and cluster files: what works, and every kind of mistake with file, line, key, found, allowed, remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.config import Categorical, ClusterConfig, Int, LogUniform, RunConfig, StudyConfig, StudyFile, Uniform
from hpcjobs.errors import UserError
from hpcjobs.load import cluster_folders, find_cluster, load_cluster, load_study, read_study_file, write_study_file
from hpcjobs.paths import StudyPaths

CASES = Path(__file__).parent / "cases" / "search_space"
CONFIGS = Path(__file__).parents[2] / "configs"

FIRST_SEED_DOCUMENT = """\
min_lr:
  type: "loguniform"
  min: 1e-6
  max: 1e-4
box:
  type: "uniform"
  min: 5.0
  max: 10.0
cls:
  type: "uniform"
  min: 0.2
  max: 4.0
dfl:
  type: "uniform"
  min: 0.5
  max: 3.0
hsv_h:
  type: "uniform"
  min: 0.0
  max: 0.05
"""


def study_of(folder: Path, text: str) -> StudyConfig:
    path = folder / "study.yaml"
    path.write_text(text)
    return load_study(path)[0]


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as error:
        study_of(folder, text)
    message = str(error.value)
    assert message.startswith(str(folder / "study.yaml"))
    return message


def cluster_refusal(folder: Path, text: str) -> str:
    path = folder / "site.yaml"
    path.write_text(f"name: site\ncores_per_node: 64\n{text}")
    with pytest.raises(UserError) as error:
        load_cluster(str(path))
    assert str(error.value).startswith(str(path))
    return str(error.value)


def test_the_published_ranges_file_works_word_for_word(tmp_path: Path) -> None:
    study = study_of(tmp_path, FIRST_SEED_DOCUMENT)
    assert list(study.parameters) == ["min_lr", "box", "cls", "dfl", "hsv_h"]
    assert study.parameters["min_lr"] == LogUniform(type="loguniform", min=1e-6, max=1e-4)
    assert study.parameters["hsv_h"] == Uniform(type="uniform", min=0.0, max=0.05)


def test_an_exponent_without_a_dot_is_a_number() -> None:
    study, _ = load_study(CASES / "exponent_without_dot.yaml")
    assert study.parameters["min_lr"] == LogUniform(type="loguniform", min=1e-6, max=1e-4)


def test_categorical_int_and_fixed_values_are_read_with_their_types() -> None:
    study, _ = load_study(CASES / "categorical_and_int.yaml")
    assert study.parameters["warmup_epochs"] == Int(type="int", min=0, max=4)
    assert study.parameters["batch_size"] == Categorical(type="categorical", values=(16, 32, 64))
    assert study.fixed == {"flip_lr": 0.5}


def test_the_full_form_takes_fixed_values_beside_the_ranges(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        "objective: my.module:train\ndirection: minimize\ntrials: 7\n"
        "sampler: {name: tpe, options: {multivariate: true}}\n"
        "fixed: {a: 1}\nparameters:\n  lr: {type: loguniform, min: 1e-5, max: 1e-1}\n  b: text\n",
    )
    assert (study.objective, study.direction, study.trials) == ("my.module:train", "minimize", 7)
    assert study.fixed == {"a": 1, "b": "text"}
    assert study.sampler.options == {"constant_liar": True, "multivariate": True}


def test_a_sampler_that_is_named_has_the_options_of_the_default_but_for_those_given(tmp_path: Path) -> None:
    parameters = "parameters: {x: {type: uniform, min: 0, max: 1}}\n"
    default = study_of(tmp_path, parameters).sampler
    assert study_of(tmp_path, "sampler: {name: tpe}\n" + parameters).sampler == default
    given = study_of(tmp_path, "sampler: {name: tpe, options: {multivariate: false}}\n" + parameters).sampler
    assert given.options == {**default.options, "multivariate": False}
    assert study_of(tmp_path, "sampler: {name: random}\n" + parameters).sampler.options == {}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            "typo_in_type",
            "line 1, max_lr.type: found 'loguniforn'; allowed: uniform, loguniform, int, categorical; "
            "did you mean 'loguniform'?",
        ),
        ("reversed_bounds", "line 1, momentum.max: found 0.8; allowed: more than min, which is 0.98; exchange the two"),
        ("log_from_zero", "line 1, weight_decay.min: found 0.0; allowed: more than 0 on a logarithmic scale; start at"),
        ("duplicate_key", "line 3: cls: found the key a second time (first in line 1); allowed: once; remove one"),
        ("fixed_values_only", "found only fixed values (max_lr, momentum), so there is nothing to search"),
        ("fixed_values_only", "python -m autospeed_model.train --data OUT --set max_lr=0.01 --set momentum=0.937"),
    ],
)
def test_a_wrong_search_space_is_refused(case: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        load_study(CASES / f"{case}.yaml")
    assert str(CASES / f"{case}.yaml") in str(error.value)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("{type: uniform, min: true, max: 2}", "x.min: found true; allowed: a number"),
        ("{type: uniform, min: '1', max: 2}", "x.min: found '1'; allowed: a number"),
        ("{type: uniform, min: .nan, max: 2}", "x.min: found nan; allowed: a finite number"),
        ("{type: uniform, min: 0, max: .inf}", "x.max: found inf; allowed: a finite number"),
        ("{type: uniform, min: 0, max: 1e999}", "x.max: found 1e999, which is inf in double precision; allowed: a"),
        ("{type: uniform, min: -1.7e308, max: 1.7e308}", "x.max: found 1.7e+308; allowed: a range whose width"),
        ("{type: uniform, min: 1, max: 1}", "x.max: found 1.0; allowed: more than min; write a fixed value"),
        ("{type: uniform, min: 1}", "x.max: found nothing; allowed: this key is needed here"),
        ("{type: uniform, mim: 1, max: 2}", "x.mim: found an unknown key; allowed: max, min, type; did you mean 'min'"),
        ("{type: uniform, min: 1, max: 2, values: [1]}", "x.values: found an unknown key"),
        ("{type: loguniform, min: -1, max: 2}", "x.min: found -1.0; allowed: more than 0"),
        (
            "{type: loguniform, min: 1e-400, max: 2}",
            "x.min: found 1e-400, which is 0.0 in double precision; allowed: more than 0",
        ),
        ("{type: loguniform, min: 0, max: 2}", "x.min: found 0.0; allowed: more than 0"),
        ("{type: int, min: 1.0, max: 3}", "x.min: found 1.0; allowed: a whole number; write 1"),
        ("{type: int, min: 1.5, max: 3}", "x.min: found 1.5; allowed: a whole number"),
        ("{type: int, min: true, max: 3}", "x.min: found true; allowed: a whole number"),
        ("{type: int, min: 1, max: 99999999999999999999}", "x.max: found 99999999999999999999; allowed: at most"),
        ("{type: categorical, values: [1, 99999999999999999999]}", "x.values[1]: found 99999999999999999999"),
        (r'{type: categorical, values: [1, "\e[2J"]}', "x.values[1]: found '\\x1b[2J'; allowed: text of one line"),
        ("{type: int, min: 5, max: 3}", "x.max: found 3; allowed: more than min, which is 5"),
        ("{type: int, min: 3, max: 3}", "x.max: found 3; allowed: more than min; write a fixed value"),
        ("{type: int, min: 0, max: 3, step: 0}", "x.step: found 0; allowed: at least 1"),
        ("{type: int, min: 0, max: 3, step: 2}", "x.max: found 3; allowed: min plus a multiple of step; the last"),
        ("{type: int, min: 0, max: 3, log: true}", "x.min: found 0; allowed: at least 1 on a logarithmic scale"),
        ("{type: int, min: 1, max: 3, log: true, step: 2}", "x.step: found 2; allowed: 1 on a logarithmic scale"),
        ("{type: int, min: 1, max: 3, log: 1}", "x.log: found 1; allowed: true or false"),
        ("{type: categorical, values: 3}", "x.values: found 3; allowed: a list; put it in brackets"),
        ("{type: categorical, values: []}", "x.values: found the list []; allowed: at least two values"),
        ("{type: categorical, values: [16]}", "x.values: found the list [16]; allowed: at least two values"),
        ("{type: categorical, values: [1, 2, 1.0]}", "x.values: found 1.0; allowed: each value once"),
        ("{type: categorical, values: [1, true]}", "x.values: found true; allowed: each value once"),
        ("{type: categorical, values: [1, .nan]}", "x.values[1]: found nan; allowed: a finite number"),
        ("{type: categorical, values: [[1], 2]}", "x.values[0]: found the list [1]; allowed: a number, text"),
        ("{min: 1, max: 2}", "x.type: found nothing; allowed: uniform, loguniform, int, categorical"),
        ("{type: 3}", "x.type: found 3; allowed: uniform"),
        ("{type: [int]}", "x.type: found the list ['int']; allowed: uniform"),
        ("[1, 2]", "x: found the list [1, 2]; allowed: a mapping with a type"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_key(tmp_path: Path, parameter: str, expected: str) -> None:
    assert f"line 2, {expected}" in refusal(tmp_path, f"ok: {{type: uniform, min: 0, max: 1}}\nx: {parameter}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trials: 0", "trials: found 0; allowed: at least 1"),
        ("trials: many", "trials: found 'many'; allowed: a whole number"),
        ("epochs: 5.0", "epochs: found 5.0; allowed: a whole number; write 5"),
        ("seed: -1", "seed: found -1; allowed: at least 0"),
        ("direction: max", "direction: found 'max'; allowed: maximize, minimize"),
        ("trails: 3", "did you mean 'trials'?"),
        ("sampler: tpe", "sampler: found 'tpe'; allowed: a mapping, such as {name: tpe}"),
        ("pruner: ash", "pruner: found 'ash'; allowed: a mapping, such as {name: asha}"),
        ("pruner:", "pruner: found null (nothing); allowed: a mapping, such as {name: asha}"),
        ("pruner: {name: median, option: {}}", "pruner.option: found an unknown key; allowed: name, options; did you"),
        ("objective: train", "objective: found 'train'; allowed: module:function; for example"),
        ("objective: 'os; import:x'", "allowed: module:function"),
        ("fixed: {x: 1}", "fixed.x: found 'x'; allowed: either searched or fixed; remove one of the two"),
        ("fixed: {y: [1]}", "fixed.y: found the list [1]; allowed: a number, text, true, false or null"),
        ("fixed: 3", "fixed: found 3; allowed: a mapping"),
    ],
)
def test_a_wrong_setting_of_the_full_form_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    message = refusal(tmp_path, f"parameters:\n  x: {{type: uniform, min: 0, max: 1}}\n{text}\n")
    assert "line 3, " in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("parameters: 3\n", "line 1: parameters: found 3; allowed: a mapping of names to ranges"),
        ("parameters: {}\n", "line 1, parameters: found null (nothing); allowed: at least one parameter with a range"),
        ("fixed: {a: 1}\nparameters: {}\n", "found only fixed values (a)"),
        ("objective: a:b\nx: {type: uniform, min: 0, max: 1}\n", "line 1: objective: found a setting of the study"),
        ("objective: a:b\nparamters: {}\n", "is 'paramters' meant to be it?"),
        ("paramters:\n  x: {type: uniform, min: 0, max: 1}\n", "did you mean 'parameters'?"),
        ("parameters: {x: {type: int, min: 0, max: 1}, y: 1}\nfixed: {y: 2}\n", "y: found it fixed twice"),
    ],
)
def test_the_two_forms_are_not_mixed_up(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path, "b: {type: uniform, min: 2, max: 1}\na: {type: unifrom}\nc: {type: int, min: x}\n"
    ).splitlines()
    assert lines[0].endswith("4 mistakes")
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "line 1, b.max", "line 2, a.type", "line 3, c.max", "line 3, c.min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("partition: gpu", "line 3, partition: found an unknown key; allowed: account,"),
        ("slurm_partiton: gpu", "did you mean 'slurm_partition'?"),
        ("account: 465000000", "account: found 465000000; allowed: text; put it in quotes"),
        ("timeout_min: 0", "timeout_min: found 0; allowed: at least 1"),
        ("gpu_vendor: intel", "gpu_vendor: found 'intel'; allowed: amd, nvidia, none"),
        ("mode: {by: constraint}", "mode.modes: found 'none'; allowed: some of spx, dpx, qpx, cpx"),
        ("mode: {by: comment, modes: [cpx, cxp]}", "mode.modes[1]: found 'cxp'; allowed: spx, dpx, qpx, cpx; did you"),
        ("mode: {by: comment, modes: [cpx], default: spx}", "mode.default: found 'spx'; allowed: one of modes: cpx"),
        ("mode: {modes: [cpx]}", "mode.modes: found 'cpx'; allowed: nothing while by is none"),
        ("mode: {by: constraint, modes: [cpx]}\ngpu_vendor: nvidia", "mode.by: found 'constraint'; allowed: none"),
        ("modules: rocm", "modules: found 'rocm'; allowed: a list; put it in brackets: [...]"),
        ("sbatch: {array: 0-3}", "sbatch.array: found 'array'; allowed: a long option's name"),
        ("sbatch: {--mem: 0}", "sbatch.--mem: found '--mem'; allowed: a long option's name"),
        ("sbatch: {contiguous: false}", "sbatch.contiguous: found false; allowed: text, a number or true; leave the"),
        ('sbatch: {comment: "a\\n#SBATCH --uid=0"}', "allowed: text of one line, without control characters"),
        ('setup: ["a\\nb"]', "setup[0]: found 'a\\nb'; allowed: text of one line"),
        ("reserved_cpus: [0, -1]", "reserved_cpus[1]: found -1; allowed: at least 0"),
        ("reserved_cpus: 0-3", "reserved_cpus: found '0-3'; allowed: a list; put it in brackets: [...]"),
        ("reserved_cpus: [0-3]", "reserved_cpus[0]: found '0-3'; allowed: a whole number"),
        ("environment: {A: 1}", "environment.A: found 1; allowed: text; put it in quotes"),
        ("environment: {'A B': x}", "environment.A B: found 'A B'; allowed: letters, digits and _"),
        ("account: ''", "account: found ''; allowed: text of one line"),
    ],
)
def test_a_wrong_key_of_a_profile_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    message = cluster_refusal(tmp_path, text)
    assert "line 3" in message
    assert expected in message


def test_a_value_of_the_command_line_wins_and_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: site\ncores_per_node: 64\nmode: {by: constraint, modes: [spx, cpx]}\n")
    cluster = load_cluster(str(path), {("mode", "default"): "cpx", ("timeout_min",): 5})
    assert (cluster.mode.default, cluster.timeout_min) == ("cpx", 5)
    with pytest.raises(UserError, match=r"--set, timeout_mn: found an unknown key.*did you mean 'timeout_min'"):
        load_cluster(str(path), {("timeout_mn",): 5})
    with pytest.raises(UserError, match=r"--set name\.x: name is no mapping"):
        load_cluster(str(path), {("name", "x"): 5})


def test_a_profile_is_found_by_its_bare_name_and_the_nearest_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_cluster("lumi") == CONFIGS / "clusters" / "lumi.yaml"
    with pytest.raises(
        UserError, match=r"found 'lum'; allowed: a path to a YAML file, or one of .*; did you mean 'lumi'"
    ):
        find_cluster("lum")
    (tmp_path / "configs" / "clusters").mkdir(parents=True)
    (tmp_path / "configs" / "clusters" / "lumi.yaml").touch()
    assert find_cluster("lumi") == tmp_path / "configs" / "clusters" / "lumi.yaml"
    assert len(cluster_folders()) >= 2


@pytest.mark.parametrize("path", sorted((CONFIGS / "clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_profile_that_comes_along_is_valid_and_named_as_its_file(path: Path) -> None:
    assert load_cluster(str(path)).name == path.stem


def test_a_study_file_comes_back_from_its_folder_unchanged(tmp_path: Path) -> None:
    study, _ = load_study(CONFIGS / "studies" / "all-parameters.yaml")
    cluster = ClusterConfig(name="1e-6", cores_per_node=64, environment={"ON": "on", "N": "010"}, setup=("a: 'b' é",))
    file = StudyFile(name="ätudes: #1", study=study, run=RunConfig(data=tmp_path / "it's é"), cluster=cluster)
    write_study_file(StudyPaths(tmp_path), file)
    assert read_study_file(StudyPaths(tmp_path)) == file


def test_a_folder_without_a_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no study\.yaml; allowed: a study folder"):
        read_study_file(StudyPaths(tmp_path))


def test_a_study_file_of_another_version_is_refused(tmp_path: Path) -> None:
    study, _ = load_study(CONFIGS / "studies" / "experiment1.yaml")
    write_study_file(StudyPaths(tmp_path), StudyFile(name="x", study=study, run=RunConfig()))
    path = tmp_path / "study.yaml"
    path.write_text(path.read_text().replace("version: 1", "version: 2"))
    with pytest.raises(UserError, match="line 1, version: found 2; allowed: 1"):
        read_study_file(StudyPaths(tmp_path))

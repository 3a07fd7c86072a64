"""What a sweep is asked for, and what it asks the training program for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dist_ckpt.errors import ConfigError, DistCkptError, PlanError
from dist_ckpt.policy import EveryKPolicy, NoPolicy, PerStagePolicy, SegmentsPolicy, SelectivePolicy, policy_from
from dist_ckpt.trainer.config import load_config
from dist_ckpt.trainer.keys import leaves
from dist_ckpt.trainer.overrides import CONFIGS
from dist_ckpt.trainer.sweep.folder import claimed
from dist_ckpt.trainer.sweep.options import Candidate, SweepOptions, read_sweep

POLICIES = [
    "none",
    "full",
    {"mode": "every_k", "k": 3},
    {"mode": "segments", "k": 2, "skip_last": True},
    {"mode": "selective", "save": ["matmul", "aten.mm.default"], "blocks": 'layers.*,"x"'},
    {"mode": "nested", "inner": ["attention", "mlp"], "preserve_rng_state": False},
    {"per_stage": ["full", {"mode": "segments", "k": 3}, "none"]},
]


@pytest.mark.parametrize("spec", POLICIES, ids=str)
def test_the_training_program_reads_the_policy_that_was_meant(spec: object) -> None:
    policy = policy_from(spec)  # type: ignore[arg-type]
    assert load_config(Candidate(policy).arguments).ckpt == policy


def test_names_of_folders_differ_and_need_no_quotes() -> None:
    candidates = [Candidate(policy_from(spec)) for spec in POLICIES]  # type: ignore[arg-type]
    candidates.append(Candidate(policy_from({"per_stage": ["full", "none", "none"]})))
    names = [candidate.name for candidate in candidates]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w=.-]{1,60}", name) for name in names), names
    assert Candidate(SegmentsPolicy(k=2)).name == "segments-k=2"


def test_policies_come_in_order_and_once() -> None:
    sweep = read_sweep(["sweep.ckpt=[none,{mode: every_k, k: 2}]", "sweep.k=[0,4]", "nproc=2", "+train.lr=1e-4"])
    assert sweep.options.policies == (NoPolicy(), EveryKPolicy(k=2), SegmentsPolicy(k=4))
    assert [candidate.k for candidate in sweep.candidates] == [0, None, 4]
    assert (sweep.nproc, sweep.config.train.lr, sweep.steps) == (2, 1e-4, 12)
    assert sweep.arguments == ("+train.lr=1e-4",)


def test_only_plain_segments_are_points_of_their_curve() -> None:
    policies = [SegmentsPolicy(), SegmentsPolicy(k=2, skip_last=True), SelectivePolicy(), PerStagePolicy()]
    assert [Candidate(policy).k for policy in policies] == [None] * 4


def test_samples_of_an_update_follow_the_micro_batch() -> None:
    sweep = read_sweep(["sweep.k=[0]", "nproc=4", "engine=deepspeed_pipe", "train.grad_accum=3", "train.micro_batch=2"])
    assert (sweep.samples(2), sweep.samples(5)) == (2 * 3 * 2, 5 * 3 * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "sweep: nothing to compare"),
        (["sweep.rounds=2"], "sweep: nothing to compare"),
        (["sweep.ckpt=full"], "sweep.ckpt=full: must be a list of policies"),
        (["sweep.ckpt=[none,ful]"], r"sweep.ckpt\[1\]: ckpt: no mode 'ful'; did you mean 'full'"),
        (["sweep.ckpt=[{mode: full, k: 2}]"], r"sweep.ckpt\[0\]: ckpt.k: no option of mode 'full'"),
        (["sweep.k=[0,-1]"], "sweep.k: -1 is no number of blocks"),
        (["sweep.k=[a]"], "sweep.k=.*: must be a list of integers"),
        (["sweep.k=[0]", "sweep.round=2"], "sweep.round: no such key; did you mean 'rounds'"),
        (["sweep.k=[0]", "sweep.budget_gib=0"], "sweep.budget_gib=0.*: must be above 0"),
        (["sweep.k=[0]", "nproc=0"], "nproc=0: must be at least 1"),
        (["sweep.k=[0]", "nproc=3", "engine=deepspeed_pipe"], "engine.stages=2: must divide the 3 ranks"),
        (["sweep.k=[0]", "+ckpt=full"], r"\+ckpt=full: sweep.ckpt names the policies"),
        (["sweep.k=[0]", "ckpt.k=2"], "ckpt.k=2: sweep.ckpt names the policies"),
        (["sweep.k=[0]", "report.html=true"], "report.html=true: a sweep measures every run alike"),
        (["sweep.k=[0]", "dry_run=true"], "dry_run=true: a sweep runs for real"),
        (["sweep.k=[0]", "train.resume=auto"], "train.resume=auto: each run starts anew"),
        (["sweep.k=[0]", "train.steps=3"], "train.steps=3: 2 updates warm up, .*at least 4"),
        (
            ["sweep.k=[0]", "sweep.budget_gib=1", "train.global_batch=8"],
            ".*give train.grad_accum",
        ),
        (["sweep.k=[0]", "train.stepz=3"], "train.stepz: no such key"),
        (["sweep.k=[0]", "--wat"], "--wat: no such flag"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(arguments: list[str], message: str) -> None:
    with pytest.raises(DistCkptError, match=message):
        read_sweep(arguments)


def test_the_page_describes_every_key() -> None:
    page = (CONFIGS.parent / "docs" / "sweeps.md").read_text(encoding="utf-8")
    assert [key for key in leaves(SweepOptions) if f"| `{key}` |" not in page] == []


def test_a_policy_in_deepspeeds_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "activation_checkpointing": {"number_checkpoints": 2}}')
    with pytest.raises(ConfigError, match="its section activation_checkpointing is a policy"):
        read_sweep(["sweep.k=[0]", "engine=deepspeed", f"engine.config={file}"])


def test_an_option_of_another_policy_names_its_place() -> None:
    with pytest.raises(PlanError, match=r"^sweep.ckpt\[1\]: "):
        read_sweep(["sweep.ckpt=[none,{mode: full, save: matmul}]"])


def test_a_sweep_goes_on_only_where_its_figures_are_comparable(tmp_path: Path) -> None:
    def claim(*arguments: str) -> None:
        with claimed(read_sweep([f"run_dir={tmp_path / 'sweep'}", *arguments])) as folder:
            assert folder.path == tmp_path / "sweep"

    claim("sweep.k=[0,2]")
    claim("sweep.ckpt=[full]", "sweep.rounds=5", "sweep.budget_gib=1")
    with claimed(read_sweep(["sweep.k=[0]", f"run_dir={tmp_path}/../{tmp_path.name}/sweep"])):
        pass
    with pytest.raises(ConfigError, match=r"other runs \(nproc 1 → 2, train.micro_batch 4 → 8\)"):
        claim("sweep.k=[0,2]", "nproc=2", "train.micro_batch=8")


def test_a_folder_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    taken = read_sweep(["sweep.k=[0]", f"run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="holds something else"), claimed(taken):
        pass
    sweep = read_sweep(["sweep.k=[0]", f"run_dir={tmp_path / 'new'}"])
    with claimed(sweep), pytest.raises(ConfigError, match="is in use by another sweep"), claimed(sweep):
        pass
    with claimed(sweep):
        pass
    nowhere = read_sweep(["sweep.k=[0]", f"run_dir={tmp_path / 'notes.txt' / 'x'}"])
    with pytest.raises(ConfigError, match="cannot be written to: Not a directory"), claimed(nowhere):
        pass

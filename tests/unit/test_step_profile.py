"""A profile as text."""

from __future__ import annotations

from dist_ckpt.memory.profile.step_profile import KINDS, Holding, Phase, StepProfile


def test_a_printed_profile_says_what_the_peak_is_made_of() -> None:
    mib = 2**20
    at_peak = dict.fromkeys(KINDS, 0) | {"params": 3 * mib, "activations": mib}
    holdings = (
        Holding("params", "layers.0", "layers.0.weight", (512, 1024), "float32", 2 * mib, 1),
        Holding("activations", None, "aten::mm", None, None, mib, 3),
    )
    profile = StepProfile(
        rank=1,
        stage=None,
        device="cpu",
        step=7,
        duration_s=1.0,
        start_bytes=3 * mib,
        boundary_bytes=3 * mib,
        end_bytes=3 * mib,
        peak_bytes=4 * mib,
        peak_s=0.5,
        phase="backward",
        at_peak=at_peak,
        holdings=holdings,
        rest_bytes=mib,
        phases=(Phase("backward", 0, 0.0, 1.0, 4 * mib, at_peak),),
        spans=(),
        times_s=(0.0,),
        timeline={kind: (nbytes,) for kind, nbytes in at_peak.items()},
    )
    assert str(profile).splitlines() == [
        "peak of 4.000 MiB in backward (rank 1, step 7)",
        "params               3.000   75.0%",
        "activations          1.000   25.0%",
        "heaviest",
        "params               2.000   50.0%  layers.0: layers.0.weight, 1 of 512 × 1024 float32",
        "activations          1.000   25.0%  aten::mm, 3 in all",
    ]

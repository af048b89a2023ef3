"""Both sides of renewals, killed at every step: some days of what ``make soak-identity`` does for a year."""

from __future__ import annotations

from tests.control.kills import KilledYear, memory_folder


def test_days_of_renewals_with_a_kill_at_every_other_step_lock_nobody_out() -> None:
    with memory_folder() as folder:
        year = KilledYear(folder, seed=2, kill=0.5)
        year.run(1.0)
    assert year.renewals >= 2
    assert year.killed.total() >= 3

"""Faults in starting, signalling and ending ranks."""

from tests.mutants.fault import fault

RANKS = "ftkit/launch/ranks.py"
LAUNCH = "tests/test_launch.py::"
LIFE = "tests/test_life.py::"

FAULTS = (
    fault(
        "a signal kills a rank that does not listen yet",
        RANKS,
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)",
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())",
        LAUNCH + "test_a_signal_before_the_ranks_listen_is_not_lost[2]",
    ),
    fault(
        "the launcher forwards no signal",
        RANKS,
        "                    os.kill(process.pid, signal.SIGINT)\n",
        "                    pass\n",
        LAUNCH + "test_a_run_that_is_asked_to_end_saves_and_ends_with_75[SIGUSR1]",
    ),
    fault(
        "children of ranks outlive the second Ctrl-C",
        RANKS,
        "            kill_children(process.pid)\n",
        "",
        LAUNCH + "test_a_second_ctrl_c_ends_at_once_with_130",
    ),
    fault(
        "a rank goes on whose launcher died while it imported torch",
        RANKS,
        "    if os.getppid() != launcher:",
        "    if False:",
        LAUNCH + "test_no_rank_outlives_the_launcher[SIGKILL]",
    ),
    fault(
        "a lost connection is taken for the cause",
        RANKS,
        "kind = 4 if LOST_CONNECTION.search(failure.message) else 2",
        "kind = 2",
        LAUNCH + "test_the_cause_goes_before_its_consequences",
    ),
    fault(
        "a restart resumes from a checkpoint that --resume PATH passed over",
        "ftkit/cli/training.py",
        "if written_at(path) > last), *given]",
        "), *given]",
        LIFE + "test_a_restart_goes_on_from_what_was_saved_since_or_from_what_the_user_said",
    ),
    fault(
        "a run is restarted although the user asked it to end",
        "ftkit/cli/training.py",
        " or not restarts or error.asked:",
        " or not restarts:",
        LIFE + "test_a_run_that_was_asked_to_end_is_not_started_again",
    ),
)

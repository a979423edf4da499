r"""The published *code_exec* manual, sentence by sentence, each with the tests that hold it.

A line that is not indented is a heading of the manual. Below it, each sentence stands to the letter, and below that the
tests, each of which runs through the library, over HTTP and over MCP. `test_map.py` holds this list to the tests and to
the manual: no sentence is left out or altered, none has no test, and no test is missing here.

What the manual says of other tools (a terminal, a file system) is advice on when to use which. Of such a sentence the
tests hold what it says of this tool.

--- manual ---

code_exec — Manual

What it does

    Runs Python in a subprocess and returns stdout (and stderr, prefixed [stderr]).
        test_it_runs_python_and_returns_what_is_written, test_standard_error_follows_behind_its_prefix
        test_a_program_runs_in_a_process_of_its_own
    The interpreter is fresh on every call — no state persists between calls, so import everything you need in each
    script.
        test_no_state_persists_between_calls, test_each_script_must_import_what_it_needs
        test_no_process_of_a_call_outlives_it
    Success means exit code 0.
        test_success_means_exit_code_0, test_a_program_that_a_signal_ends_is_no_success
    A non-zero exit is returned as success: false with the exit code and the full output, which is usually the
    traceback: read it, it is your own bug, not a tool failure.
        test_a_failure_has_its_exit_code_and_the_full_output, test_the_traceback_shows_the_line_that_failed
        test_long_output_of_a_failure_can_be_had_whole, test_a_failed_task_has_its_real_result

Parameters

    {"code": "import json, pathlib\nprint(json.loads(pathlib.Path('package.json').read_text())['version'])"}
        test_the_first_example_runs_as_given, test_there_are_four_parameters, test_what_is_no_call_is_refused
    {"code": "print(sum(len(l) for l in open('data.csv')))", "working_dir": "/home/user/project"}
        test_the_second_example_runs_as_given, test_the_second_example_runs_in_the_clients_own_project
    {"code": "import time\nfor i in range(5):\n    print(i); time.sleep(1)", "timeout": 120}
        test_the_third_example_runs_as_given

When to use it

    Use code_exec for anything that is properly a program: parsing and transforming data, calculation, text munging,
    calling a Python library, a quick check of a value.
        test_it_does_what_is_properly_a_program
    Use terminal instead when the task is shell-native — pipes, grep/awk, system commands, a CLI tool.
        test_a_command_of_the_shell_works_where_another_tool_would_do
    A script whose output you then have to read back is often slower than one filesystem/terminal call.
        test_what_is_read_back_is_the_output_alone
    Reach for Python when the alternative is a long chain of tool calls, not by reflex.
        test_a_chain_of_steps_is_one_program

Detaching long runs

    Pass "background": true for a suite, a large computation or anything that outlives the turn.
        test_a_detached_call_outlives_the_turn, test_a_call_in_the_foreground_ends_with_its_client
        test_a_detached_call_works_in_the_directory_too
        test_after_a_kill_tasks_tell_the_truth_and_nothing_is_left, test_after_an_orderly_restart_tasks_tell_the_truth
    You get a task_id back immediately and the real result arrives as a note at the start of a later turn; check it with
    the tasks tool.
        test_a_detached_call_answers_at_once_with_a_task_id
        test_the_result_is_a_note_at_the_next_turn_exactly_once, test_turns_at_once_have_a_note_once_between_them
        test_notes_can_be_taken_without_a_run, test_notes_are_their_users_own
        test_a_call_that_is_given_up_takes_no_note_with_it, test_a_result_stays_readable_after_its_note
        test_the_tasks_tool_lists_and_shows, test_the_tasks_tool_waits, test_the_tasks_tool_cancels
        test_the_note_of_a_cancelled_task_says_so, test_tasks_are_their_users_own
    A detached call without an explicit timeout gets 300 s from the executor — so pass timeout when the work
    legitimately needs the ceiling, and remember 300 s is the maximum either way.
        test_a_detached_call_without_a_timeout_has_300_seconds, test_a_timeout_is_clamped_in_the_background_too
        test_300_seconds_are_the_maximum_of_a_detached_run

Limits

    • Timeout is clamped: 0 becomes 1, 10000 becomes 300, and a non-numeric value falls back to 30.
        test_a_timeout_is_clamped_and_never_refused, test_the_published_parameters_say_the_bounds
        test_a_null_that_is_given_is_no_number_in_the_background_either
    You cannot get more than 300 s in the foreground — use a persistent terminal for genuinely long jobs.
        test_a_timeout_is_clamped_and_never_refused, test_a_run_within_its_timeout_is_left_alone
    • For a non-admin user the working directory is confined to user_data/<user_id>/; an absolute working_dir outside it
    is silently replaced with the sandbox root, and relative paths are resolved inside it.
        test_an_ordinary_user_works_in_a_directory_of_user_data, test_the_directory_of_a_user_is_made_when_it_is_needed
        test_files_persist_for_their_user, test_files_are_nobody_elses
        test_an_absolute_directory_outside_is_replaced_by_the_root, test_the_replacement_is_silent_and_reported
        test_relative_directories_are_resolved_inside, test_absolute_directories_inside_are_what_they_are
        test_dots_do_not_leave_the_root, test_links_do_not_leave_the_root, test_a_loop_of_links_leads_nowhere
        test_a_link_that_is_swapped_meanwhile_does_not_leave_the_root, test_names_of_every_script_are_names
        test_names_are_as_long_as_the_host_has_them, test_what_is_no_directory_is_told
        test_an_ordinary_user_cannot_claim_the_clients_directory
    Admin and single-user runs use the client's working directory.
        test_an_admin_works_in_the_clients_directory
        test_a_single_user_run_is_in_the_clients_directory, test_a_single_user_run_stays_in_the_clients_directory
    • Temp scripts are written inside that directory and deleted afterwards.
        test_the_script_is_in_the_directory_while_it_runs, test_the_script_is_gone_however_the_run_ends
        test_the_script_is_gone_however_a_single_user_run_ends, test_the_script_is_gone_when_the_call_is_cancelled
        test_runs_at_once_in_one_directory_have_scripts_of_their_own
        test_after_a_kill_tasks_tell_the_truth_and_nothing_is_left
    • On timeout the process is killed and you get Code execution timed out after Ns with error: timeout — a timeout is
    not a partial result; nothing from the run is returned.
        test_what_runs_out_of_time_is_told_in_these_words, test_the_whole_process_tree_is_killed
        test_what_was_written_before_the_timeout_stays_in_the_record, test_a_detached_run_that_times_out_says_the_same

Common mistakes

    • Assuming imports or variables survive between calls.
        test_each_script_must_import_what_it_needs
    They do not — every call starts clean.
        test_no_state_persists_between_calls, test_no_process_of_a_call_outlives_it
    • print()-less scripts: nothing is written to stdout means (no output), which looks like a silent failure but is a
    successful run.
        test_nothing_written_is_no_output_and_a_success
    • Using code_exec to run subprocess.run("ls") when terminal or filesystem list was the tool.
        test_a_command_of_the_shell_works_where_another_tool_would_do
    • Leaving the default 30 s on a test suite that needs 90, then reading the timeout as a broken test.
        test_the_default_is_30_seconds, test_a_timeout_is_told_apart_from_a_failure
        test_what_needs_more_than_the_default_must_say_so
    • Writing to a path outside the sandbox and getting a file that is not where you expected.
        test_what_is_written_outside_is_not_on_the_host
"""

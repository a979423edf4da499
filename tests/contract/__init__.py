"""The published *Code Execution* contract, sentence by sentence: each that states a rule, and the tests that hold it.

The tests are written from the contract and the product's pages, not from its code. They run for both languages where
a rule is about what is run. `test_map.py` holds this list to the tests: none is missing here, and none is only here.

Summary
  Bounded Python or JavaScript work.
    test_the_language_is_python_or_javascript, test_there_is_no_third_language
  Each attempt has fresh writable state; files and process state don't carry over.
    as under *One tool call* below
  Outbound access starts off; `allow_network=true` enables it. Code has at most 100,000 characters, a timeout defaults
  to 30 seconds. The result is a report, no proof. A valid dependency can be refused.
    as under the sections that say the same again

The platform hosts the tool
  It controls the time, the memory, the environment variables and the network of a run.
    test_the_timeout_is_kept, test_the_timeout_given_is_the_timeout_in_force
    test_the_memory_given_is_the_memory_in_force, test_memory_within_the_limit_can_be_used_and_no_more
    test_the_environment_is_the_platforms_to_control, test_the_commands_own_environment_is_not_the_programs
    test_names_of_environment_variables_are_names, test_standard_input_is_at_its_end
    test_what_is_denied_is_in_the_report_and_in_the_log

One tool call, not an agent
  One logical call has the code and the options.
    test_a_call_comes_from_a_file_or_from_standard_input, test_a_call_is_an_object
    test_language_and_code_must_be_given, test_unknown_fields_are_refused
  It can settle before any attempt.
    test_a_refused_call_settles_before_any_attempt, test_what_is_no_call_makes_no_attempt
    test_a_file_that_is_not_there_has_a_result, test_a_host_that_cannot_confine_has_a_result
    test_a_call_that_cannot_be_written_down_has_a_result, test_a_policy_that_is_none_has_a_result
    test_a_refused_call_has_the_published_form
  Or one or more attempts are made before the one terminal result is supplied.
    test_each_call_has_one_result_of_its_own, test_an_attempt_is_told_with_its_times
    test_an_infrastructure_failure_causes_another_isolated_attempt
    test_what_the_program_prints_is_in_the_object_alone, test_an_interrupted_command_has_one_result
    test_what_is_no_json_object_has_a_result, test_nesting_without_end_has_a_result
  An attempt is a code run.
    test_an_attempt_knows_its_call_and_its_number_and_the_log_has_them
  Each attempt has fresh writable state. What one leaves does not become the state of the next.
    test_files_and_processes_of_one_attempt_are_not_there_in_the_next
    test_state_does_not_pass_from_one_language_to_the_other, test_attempts_at_the_same_time_share_nothing
    test_a_variable_of_one_call_is_not_there_in_the_next

Within the published bounds
  The tool accepts these values: so no others, and each fault is told.
    test_all_faults_are_told_together_each_with_its_path, test_a_contradiction_is_told_beside_other_faults
    test_faults_of_text_are_told_together, test_all_faults_are_told_at_once, test_any_json_is_a_call_or_is_refused
    test_what_is_a_call_is_one_by_the_published_schema, test_the_same_key_twice_is_refused
    test_values_out_of_bounds_are_refused_with_their_path, test_a_fault_of_type_hides_no_fault_of_value
    test_a_name_that_is_no_text_hides_no_other_fault, test_deep_nesting_is_refused
  And, beside them, a key under which the same call is answered once.
    test_an_idempotency_key_may_be_given, test_an_idempotency_key_is_nothing_else
  Language: `python` or `javascript`.
    as under *Summary*
  Source code: at most 100,000 characters.
    test_source_code_may_have_100000_characters, test_source_code_may_not_have_more_than_100000_characters
    test_the_longest_source_code_runs, test_source_code_is_not_empty, test_source_code_is_text
    test_code_that_is_no_text_is_refused, test_a_whole_pair_is_one_character
  Packages: at most 50; each specifier has 3 to 214 characters, and a version delimiter.
    test_there_may_be_50_packages, test_there_may_not_be_51_packages, test_a_specifier_has_3_to_214_characters
    test_a_specifier_has_no_fewer_and_no_more, test_a_specifier_contains_a_version_delimiter
  Timeout: 1 to 300 seconds; 30 when omitted.
    test_a_timeout_is_1_to_300_seconds, test_a_timeout_is_nothing_else, test_the_timeout_is_30_seconds_when_omitted
  Working memory: 128 to 2,048 MiB; 512 when omitted.
    test_memory_is_128_to_2048_mib, test_memory_is_nothing_else, test_memory_is_512_mib_when_omitted
  Environment variables: at most 50 string values.
    test_there_may_be_50_environment_variables, test_there_may_not_be_51_environment_variables
    test_values_of_environment_variables_are_strings, test_values_of_environment_variables_are_text
  Network: off when omitted; when enabled, the domain setting chooses.
    test_allow_network_is_true_or_false, test_domains_are_null_or_a_list, test_a_domain_is_a_string
    test_a_domain_is_a_host_name
  The package grammar accepts empty and wildcard version selectors.
    test_empty_and_wildcard_version_selectors_are_in_the_grammar
  A valid dependency can be refused by the package policy, or because the version is not to be had. (Until packages are
  prepared, all are, with one reason.)
    test_a_valid_dependency_can_be_refused

Network access is explicit
  It starts off for every run; `allow_network=true` enables it.
    test_network_is_off_unless_it_is_enabled, test_network_starts_off_again_after_a_run_that_had_it
  The domain setting is optional; omitted or null, access is restricted to the registry defaults of the language.
    test_without_domains_the_registry_is_reached_and_nothing_else, test_the_registry_is_read_only
  `allow_network=false` is the only setting that blocks all.
    test_allow_network_false_is_the_only_block_all, test_domains_without_the_network_are_contradictory
  An empty list allows unrestricted outbound access.
    test_an_empty_list_is_unrestricted, test_every_public_destination_does_not_mean_this_host
  A list restricts access to the named host names and their subdomains.
    test_a_list_reaches_the_named_hosts_and_their_subdomains_and_nothing_else
    test_names_that_look_like_a_named_host_are_not_below_it
    test_a_named_subdomain_does_not_open_what_is_above_it, test_each_named_host_is_reached
  An infrastructure failure can cause another isolated attempt before the result. Fresh state is not exactly-once
  execution; an effect needs a key that is stable across attempts.
    test_an_infrastructure_failure_causes_another_isolated_attempt
    test_what_the_program_did_causes_no_other_attempt

The result is a report
  Its status is `success`, `error`, `timeout` or `killed`.
    test_there_are_four_statuses, test_each_ending_has_its_status_its_output_and_the_published_form
    test_a_call_that_its_caller_ends_is_killed, test_an_exit_status_is_the_programs_own
    test_every_ending_has_its_exit_status, test_the_published_form_refuses_what_is_no_result
  Up to 1,000,000 characters of standard output, and 100,000 of standard error.
    test_output_is_kept_up_to_its_bound_and_counted, test_what_is_far_beyond_both_bounds_is_counted_exactly
    test_bytes_that_are_no_text_are_replaced_and_flagged, test_the_streams_are_apart
    test_output_with_every_character_is_one_json_object
  A structured return value is permitted, and not populated: print what must be observed.
    test_the_return_value_is_there_and_null
  Without an answer before the tool's deadline, the generic timeout result is supplied instead.
    test_a_call_not_answered_before_its_deadline_has_the_timeout_result
  It reports what was observed, and proves neither that an external request ran or succeeded nor that it failed or had
  an effect.
    test_an_error_may_have_had_an_effect, test_a_success_may_have_had_none

Sentences that state no rule for this program
  About the platform around it: when an executor is eligible; that an application calls the tool through no SDK; that an
  attempt is no agent, task, context or SDK tool; that a result is recorded in the conversation's history and may be
  selected for a model's input. Sluicegate is what such a platform would call; it has no conversations.
  Advice to authors: use an exact, reviewed version; treat each destination, and each value sent there, as an action
  outside; put no secrets into environment variables; use a tool with its own authorisation for what must happen once;
  validate a change at the system that owns it. What the program can do for it is under the rules above.
  Warnings that promise nothing: a package's name and version are no evidence of its contents; code with network access
  can read and change other systems.
  References: what the threat model says of packages, tenants and output; the glossary; the links.
"""

"""The parts of the policy file: places in its text, schema, lint. `sandbox.policy_file` joins them."""

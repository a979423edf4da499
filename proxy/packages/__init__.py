"""What a package is, and which packages a policy allows. `sandbox` and the proxy judge by the same functions."""

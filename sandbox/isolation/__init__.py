"""Isolation of an attempt: bubblewrap, namespaces, seccomp, memory, and the launcher that applies them."""

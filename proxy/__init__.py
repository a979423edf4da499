"""The egress proxy: decides and forwards, and knows an attempt only by its grant.

Nothing here imports `sandbox`.
"""

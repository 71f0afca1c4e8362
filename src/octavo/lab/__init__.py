"""The lab: every way to allocate KV memory side by side, simulated at any scale and executed on the real engine."""

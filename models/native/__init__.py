"""The model's layers on CPUs: C++ functions over channels-last activations, and their patching."""

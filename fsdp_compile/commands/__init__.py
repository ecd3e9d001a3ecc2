"""The commands of ``fsdp-compile``, a module each, and what they share: ``arguments`` and ``on_ranks``."""
